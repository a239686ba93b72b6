"""The registry: one living daemon a place, whatever way the last one ended, in a directory that is the user's alone."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.selftest import tiny
from reference.cache import registry
from reference.cache.daemon import DaemonRank
from reference.cache.registry import Claim, StatusFile
from reference.errors import CacheRefusal

KEY = "wk1:" + "0" * 32
OTHER = "wk1:" + "1" * 32
LEFT = ["lock", "socket", "status.json", "status.tmp"]


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="wcr-") as name:
        monkeypatch.setenv("WEIGHT_CACHE_DIR", name)
        yield Path(name)


def left_over(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def status(state: str = "loading", pid: int = 7) -> StatusFile:
    return StatusFile(pid, "instance", state, KEY, "lh1:0", "cpu-0", "/model", 0.0)


def fork(main: Callable[[], object]) -> int:
    """Run `main` in a child that ends with status 0 where it returns."""
    pid = os.fork()
    if pid == 0:
        try:
            main()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return pid


@pytest.fixture
def holder(root: Path) -> Iterator[int]:
    """Another process that has claimed `KEY` on cpu-0, with everything that a daemon has there."""
    told, tell = os.pipe()

    def hold() -> None:
        claim = Claim("cpu-0", KEY)
        claim.write_status(status(pid=os.getpid()))
        claim.place.socket.touch()
        claim.place.status.with_suffix(".tmp").touch()
        os.write(tell, b".")
        signal.pause()

    pid = fork(hold)
    assert os.read(told, 1) == b"."
    yield pid
    os.close(told)
    os.close(tell)
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def test_a_claim_excludes_every_other_of_its_key_and_device(root: Path, holder: int) -> None:
    with pytest.raises(CacheRefusal) as caught:
        Claim("cpu-0", KEY)
    assert caught.value.code == "daemon_exists"
    for word in (str(registry.place("cpu-0", KEY).path), f"pid {holder}", "loading", "cpu-0", "--weight-cache-mode"):
        assert word in str(caught.value)
    # The one that was refused took nothing away.
    assert left_over(registry.place("cpu-0", KEY).path) == LEFT
    Claim("cpu-0", OTHER).release()
    Claim("cpu-1", KEY).release()
    assert {place.path.name for place in registry.places("cpu-0")} == {KEY.replace(":", "-")}


def test_what_a_killed_daemon_left_is_cleared_by_the_next(root: Path, holder: int) -> None:
    os.kill(holder, signal.SIGKILL)
    os.waitpid(holder, 0)
    assert left_over(registry.place("cpu-0", KEY).path) == LEFT
    claim = Claim("cpu-0", KEY)
    assert left_over(claim.place.path) == ["lock"]
    claim.write_status(status("ready"))
    assert json.loads(claim.place.status.read_bytes())["state"] == "ready"
    claim.release()
    assert left_over(root) == []


def test_release_leaves_nothing_of_its_own_and_all_of_others(root: Path) -> None:
    ours, other = Claim("cpu-0", KEY), Claim("cpu-0", OTHER)
    ours.write_status(status())
    ours.place.socket.touch()
    ours.place.status.with_suffix(".tmp").touch()
    ours.release()
    assert left_over(root) == ["cpu-0", f"cpu-0/{OTHER.replace(':', '-')}", f"cpu-0/{OTHER.replace(':', '-')}/lock"]
    other.release()
    assert left_over(root) == []


def test_claims_and_releases_at_once(root: Path) -> None:
    """Processes that take and give up one place over and over: never two have it, none fails, nothing stays."""
    marker = root / "held"

    def claim_often() -> None:
        for _ in range(100):
            try:
                claim = Claim("cpu-0", KEY)
            except CacheRefusal as refused:
                if refused.code != "daemon_exists":
                    raise
                continue
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            claim.write_status(status())
            marker.unlink()
            claim.release()

    pids = [fork(claim_often) for _ in range(3)]
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0, 0]
    assert left_over(root) == []


@pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
def test_directory_that_goes_while_it_is_made(
    root: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    """A daemon that ends removes the place's directory; whichever call notices, the claim begins again."""
    make, errors = Path.mkdir, iter([error])
    place = registry.place("cpu-0", KEY).path

    def mkdir(path: Path, *arguments: Any, **options: Any) -> None:
        if path == place and (first := next(errors, None)):
            raise first(path)
        make(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    Claim("cpu-0", KEY).release()
    monkeypatch.undo()
    assert next(errors, None) is None


def test_places_are_newest_first_and_those_that_go_meanwhile_hide_none(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert registry.places("cpu-0") == []
    claims = [Claim("cpu-0", f"wk1:{n:032}") for n in range(3)]
    for age, claim in enumerate(claims):
        os.utime(claim.place.path, (100 + age, 100 + age))
    (root / "cpu-0" / "notes").mkdir()
    assert registry.places("cpu-0") == [claim.place for claim in reversed(claims)]
    look = Path.stat

    def vanish(path: Path, **options: bool) -> os.stat_result:
        if path == claims[1].place.path:
            raise FileNotFoundError(path)
        return look(path, **options)

    monkeypatch.setattr(Path, "stat", vanish)
    assert registry.places("cpu-0") == [claims[2].place, claims[0].place]
    monkeypatch.undo()


def refused_root() -> str:
    with pytest.raises(CacheRefusal) as caught:
        registry.root()
    assert caught.value.code == "registry"
    assert len(str(caught.value).splitlines()) == 1
    assert "WEIGHT_CACHE_DIR" in str(caught.value)
    return str(caught.value)


def test_directory_is_made_private(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, temporary = root / "runtime", root / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("WEIGHT_CACHE_DIR", str(root / "given"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    found = [registry.root()]
    monkeypatch.delenv("WEIGHT_CACHE_DIR")
    found.append(registry.root())
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    found.append(registry.root())
    assert found == [root / "given", runtime / "weight-cache", temporary / f"weight-cache-{os.getuid()}"]
    assert [path.stat().st_mode & 0o777 for path in found] == [0o700] * 3


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_directory_open_to_others(root: Path, mode: int) -> None:
    root.chmod(mode)
    message = refused_root()
    root.chmod(0o700)
    assert f"{mode:04o}" in message
    assert str(root) in message


def test_directory_of_another_user(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: uid + 1)
    message = refused_root()
    assert f"directory of user {uid + 1}" in message
    assert f"has owner {uid}" in message


def test_directory_behind_a_link(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user could turn the link round; only a directory itself is trusted."""
    (root / "true").mkdir(mode=0o700)
    (root / "link").symlink_to(root / "true")
    (root / "dangling").symlink_to(root / "nothing")
    for name in ("link", "dangling"):
        monkeypatch.setenv("WEIGHT_CACHE_DIR", str(root / name))
        assert str(root / name) in refused_root()


def test_directory_that_is_a_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "file").touch()
    for path in (root / "file", root / "file" / "below"):
        monkeypatch.setenv("WEIGHT_CACHE_DIR", str(path))
        assert str(path) in refused_root()


def test_too_long_a_path_is_refused_before_anything_is_read(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Unix socket's path has 107 bytes at most: counted, not found out when the weights are loaded."""
    fixed = len(os.fsencode(registry.place("cpu-0", KEY).socket)) - len(os.fsencode(root))
    room = 107 - fixed - len(os.fsencode(root)) - 1
    monkeypatch.setenv("WEIGHT_CACHE_DIR", str(root / ("x" * room)))
    registry.check_socket_path("cpu-0")
    monkeypatch.setenv("WEIGHT_CACHE_DIR", str(root / ("x" * (room - 1) + "é")))
    with (
        tiny.rank(tmp_path / "no checkpoint here"),
        pytest.raises(CacheRefusal, match="107 bytes, this has 108; set WEIGHT_CACHE_DIR") as caught,
    ):
        DaemonRank(0, lambda done, total: None)
    assert caught.value.code == "registry"
