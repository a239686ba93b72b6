"""What the processes of one run share."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance.run import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run("0" * 16, tmp_path)


def test_run_travels_to_workers() -> None:
    run = Run.begin(["-n", "2"])
    assert Run.from_json(run.to_json()) == run
    run.end(keep=False)
    assert not run.directory.exists()


def test_only_logs_are_kept() -> None:
    for name, kept in (("unit.log", True), ("other", False)):
        run = Run.begin()
        (run.directory / name).touch()
        run.end(keep=True)
        assert run.directory.exists() == kept
        run.end(keep=False)


def test_directory_is_short_enough_for_sockets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    run = Run.begin()
    assert run.directory.parent == Path("/tmp")
    run.end(keep=False)


def test_computed_once_by_all_processes(run: Run) -> None:
    code = f"""if True:
        from pathlib import Path
        from conformance.run import Run
        def compute():
            print("computed", flush=True)
            return b"result"
        assert Run("0", Path({str(run.directory)!r})).once("name", compute) == b"result"
    """
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said) == ["", "computed\n"]
    assert run.once("name", lambda: pytest.fail("computed again")) == b"result"


def test_failure_is_not_shared(run: Run) -> None:
    with pytest.raises(ZeroDivisionError):
        run.once("name", lambda: bytes(1 // 0))
    assert run.once("name", lambda: b"second") == b"second"
