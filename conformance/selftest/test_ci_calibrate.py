"""`python -m ci.calibrate`: what it prints, writes and refuses, as its users meet it."""

from __future__ import annotations

import io
import json
import random
import sys
from pathlib import Path

import pytest

from ci.calibrate import main
from ci.est_time_file import read_est_times, write_est_times
from ci.estimate import Estimate
from conformance.selftest.ci_samples import KIND, write_ledger
from matrix.generate import cells
from matrix.space import load_space

CLASSES = [cell.class_name for cell in cells(load_space())]
ONE = CLASSES[0]
#: After all readings that `write_ledger` makes.
LATER = ["--as-of", "2026-11-01"]


class Room:
    """A directory with ledgers, estimates and a report, and the command over it."""

    def __init__(self, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.path, self._capsys = path, capsys
        self.ledgers = path / "gathered"
        self.ledgers.mkdir()
        self.times, self.report = path / "est_time.json", path / "reports" / "est_time.md"

    def run(self, *arguments: str, sources: list[str] | None = None) -> tuple[int, str, str]:
        files = ["--est-time", str(self.times), "--report", str(self.report)]
        try:
            status = main([*(sources or [str(self.ledgers)]), *files, *LATER, *arguments])
        except SystemExit as stop:
            status = int(stop.code or 0)
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def ledger(self, *runs: dict[str, float], name: str = "a.jsonl", **fields: object) -> Path:
        return write_ledger(self.ledgers / name, runs, **fields)  # type: ignore[arg-type]

    def refused(self, status: int, *arguments: str, sources: list[str] | None = None) -> str:
        """Run, expect this status, one line of error, no output, and files as they were; return the line."""
        before = self.times.read_bytes() if self.times.exists() else None
        got, out, err = self.run(*arguments, sources=sources)
        assert (got, out) == (status, ""), err
        assert err.startswith("ci.calibrate: ")
        assert err.count("\n") == 1, err
        assert (self.times.read_bytes() if self.times.exists() else None) == before
        assert not self.report.exists()
        return err


@pytest.fixture
def room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Room:
    return Room(tmp_path, capsys)


def steady(count: int, names: list[str] = CLASSES, factor: float = 1.0) -> list[dict[str, float]]:
    rng = random.Random(3)
    return [
        {name: (20 + 3 * place) * factor * rng.uniform(0.97, 1.03) for place, name in enumerate(names)}
        for _ in range(count)
    ]


def test_write_then_nothing_to_do(room: Room) -> None:
    room.ledger(*steady(8))
    status, out, err = room.run("--write")
    assert status == 0
    assert f"{len(CLASSES)} estimates for {KIND}; {len(CLASSES)} moved" in out
    assert "est_time.json: written" in err
    found = read_est_times(room.times)[KIND]
    assert set(found) == set(CLASSES)
    assert found[ONE].est_time == pytest.approx(20, rel=0.05)
    assert found[ONE].launch == pytest.approx(10, rel=0.05)
    assert found[ONE].tests == pytest.approx(8, rel=0.05)
    report = room.report.read_text()
    assert f"| {ONE} " in report
    before = (room.times.read_bytes(), report)
    room.ledger(*steady(3), day=8)
    assert room.run("--write")[0] == 0
    assert (room.times.read_bytes(), room.report.read_text()) == before, "noise makes no diff"
    assert room.run("--check")[0] == 0


def test_it_depends_on_readings_and_as_of_alone(room: Room) -> None:
    room.ledger(*steady(8))
    first = room.run("--format", "json")[1]
    (room.ledgers / "deep").mkdir()
    (room.ledgers / "a.jsonl").rename(room.ledgers / "deep" / "z.jsonl")
    assert room.run("--format", "json")[1] == first
    assert not room.times.exists(), "without --write nothing is written"
    status, out, _ = room.run("--as-of", "2026-10-04", "--format", "json")
    assert status == 0
    assert {row["fresh"]["readings"] for row in json.loads(out)["rows"] if row["fresh"]} == {4}, "that day included"


def test_a_ledger_from_standard_input(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    path = room.ledger(*steady(4))
    from_file = room.run("--format", "json")
    stdin = io.TextIOWrapper(io.BytesIO(path.read_bytes()))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert room.run("--format", "json", sources=["-"]) == from_file


def test_the_table_of_a_pull_request(room: Room) -> None:
    room.ledger(*[{ONE: seconds} for seconds in (280, 277, 292)])
    write_est_times(room.times, {KIND: {ONE: Estimate(100.0, 300), "TestGone": Estimate(5.0, 60)}})
    status, out, _ = room.run("--format", "markdown", "--write")
    assert status == 0
    assert out == room.report.read_text()
    row = next(line for line in out.splitlines() if line.startswith(f"| {ONE}"))
    cells_of_row = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells_of_row == [ONE, "100", "300", "3", "280", "290", "+186 %", "150", "120", "900", "measured"]
    assert f"- `{ONE}`: 100 s -> 300 s (+200 %): 3 readings of 277 s to 292 s" in out
    assert "- `TestGone`: no longer in the suite, last read never; its estimate is dropped" in out
    assert "TestGone" not in read_est_times(room.times)[KIND]


def test_check_finds_what_is_off_stale_or_missing(room: Room) -> None:
    room.ledger(*steady(6, CLASSES[:3]))
    room.run("--write")
    times = read_est_times(room.times)
    assert room.run("--check")[0] == 0
    times[KIND][CLASSES[0]] = Estimate(10.0, 300)
    times[KIND][CLASSES[1]] = Estimate(23.0, 20)
    del times[KIND][CLASSES[2]]
    write_est_times(room.times, times)
    status, _, err = room.run("--check")
    assert status == 1
    assert f"{KIND} {CLASSES[0]}: off: est_time is 10 s, readings say 2" in err
    assert f"{KIND} {CLASSES[1]}: time-out too low: 20 s, nine in ten runs take up to 2" in err
    assert f"{KIND} {CLASSES[2]}: has 6 readings and no estimate" in err
    assert err.splitlines()[-1].startswith("ci.calibrate: 3 findings; ")
    room.run("--write")
    assert room.run("--check")[0] == 0
    status, _, err = room.run("--check", "--as-of", "2026-12-31")
    assert status == 1
    assert f"{CLASSES[0]}: stale: the last reading is of 2026-10-06, 86 days ago; 45 are allowed" in err


def test_explain_shows_each_reading_and_its_part(room: Room) -> None:
    room.ledger(*[{ONE: seconds} for seconds in (20, 20.4, 19.8, 20.2, 20.1, 20.3, 19.9, 90.0)])
    room.ledger({ONE: 5.0}, outcome="failed", day=8)
    status, out, _ = room.run("--explain", ONE)
    assert status == 0
    readings = [line.split() for line in out.splitlines() if line.startswith("  2026-10-")]
    assert [line[3] for line in readings] == [
        "20.00",
        "20.40",
        "19.80",
        "20.20",
        "20.10",
        "20.30",
        "19.90",
        "90.00",
        "5.00",
    ]
    assert [line[-1] for line in readings[:7]] == ["used"] * 7
    assert "a stray: 90 s, others about 20.1 s" in out
    assert out.splitlines()[-2].endswith("failed")
    assert "7 used, 2 left out" in out
    assert "not written yet; the file has nothing" in out
    bars = [line.count("\u2588") + line.count("#") for line in out.splitlines() if line.endswith("used")]
    assert len(set(bars)) <= 2, "equal times, equal bars"
    assert min(bars) > 10
    left_out = [line for line in out.splitlines() if line.startswith("  2026-10-") and not line.endswith("used")]
    assert not any("\u2588" in line or "#" in line for line in left_out)
    assert "--explain TestNix: no reading and no estimate" in room.refused(2, "--explain", "TestNix")


def test_classes_never_run_are_predicted_and_the_error_is_shown(room: Room) -> None:
    room.ledger(*steady(5, CLASSES[:-2]))
    _, out, _ = room.run("--write", "--format", "markdown")
    found = read_est_times(room.times)[KIND]
    assert [found[name].state for name in CLASSES[-3:]] == ["measured", "modelled", "modelled"]
    assert "never run" in found[CLASSES[-1]].why
    assert "leave-one-out" in found[CLASSES[-1]].why
    assert "2 never run: predicted by least squares over" in out
    assert "in the median and" in out


def test_kinds_of_machines_do_not_mix(room: Room) -> None:
    room.ledger(*steady(5, CLASSES[:1]))
    room.ledger(*steady(5, CLASSES[:1], factor=4.0), machine="cpu-2core")
    room.run("--write")
    found = read_est_times(room.times)
    assert found["cpu-2core"][ONE].est_time == pytest.approx(4 * found[KIND][ONE].est_time, rel=0.01)
    before = found["cpu-2core"]
    room.ledger(*steady(5, CLASSES[:1], factor=9.0), machine="cpu-2core", day=10)
    room.run("--write", "--machine", KIND)
    assert read_est_times(room.times)["cpu-2core"] == before, "--machine leaves the others alone"
    assert "no readings of tpu: the ledgers hold" in refused_late(room, "--machine", "tpu")


def refused_late(room: Room, *arguments: str) -> str:
    """As `refused`, after a report was written."""
    room.report.unlink()
    return room.refused(3, *arguments)


@pytest.mark.parametrize("flags", [[], ["--check"], ["--write"], ["--explain", ONE]])
def test_without_data_nothing_changes(room: Room, flags: list[str]) -> None:
    write_est_times(room.times, {KIND: {ONE: Estimate(100.0, 300)}})
    assert "holds no *.jsonl" in room.refused(2, *flags)
    (room.ledgers / "empty.jsonl").touch()
    assert "no readings: the ledgers hold no record of a class" in room.refused(3, *flags)
    room.ledger({ONE: 50.0}, {ONE: 51.0}, outcome="failed")
    room.ledger({ONE: 0.0}, {ONE: -1.0}, day=4)
    assert "no usable reading: 1 -1 s, 1 0 s, 2 failed; estimates need runs that passed" in room.refused(3, *flags)


def test_a_newer_ledger_or_file_changes_nothing(room: Room) -> None:
    path = room.ledger(*steady(4))
    with path.open("a") as file:
        file.write('{"type":"record","format":9}\n')
    assert "ledger format 9 is newer than 1" in room.refused(2, "--write")
    path.unlink()
    room.ledger(*steady(4))
    room.times.write_text('{"format": 9, "machines": {}}')
    assert "est_time.json: format is 9; this version reads 1" in room.refused(2, "--write")


def test_torn_lines_are_said_and_lose_only_themselves(room: Room) -> None:
    path = room.ledger(*steady(5, CLASSES[:1]))
    path.write_bytes(path.read_bytes()[:-60])
    status, out, err = room.run()
    assert status == 0
    assert "a.jsonl:15: lost line: " in err
    assert "no footer" in err
    assert "1 estimates" in out
    path.write_bytes(b'{"type":"record",\n{"type":"footer"\n')
    assert "and no line of any ledger can be read" in room.refused(2)


def test_one_reading_is_an_estimate_that_says_so(room: Room) -> None:
    room.ledger({ONE: 40.0})
    room.run("--write")
    found = read_est_times(room.times)[KIND][ONE]
    assert (found.est_time, found.state) == (60.0, "few")
    assert room.run("--check")[0] == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["--as-of", "yesterday"],
        ["--check", "--write"],
        ["--registrations", "x"],
        ["--backend", "cuda"],
        ["--format", "poem"],
    ],
)
def test_options_that_make_no_sense(room: Room, arguments: list[str]) -> None:
    room.ledger(*steady(4))
    status, out, err = room.run(*arguments)
    assert (status, out) == (2, "")
    assert "error: " in err.splitlines()[-1]


def junit(path: Path, seconds: float, day: int) -> Path:
    name = path / f"run{day}.xml"
    name.write_text(
        f'<testsuite timestamp="2026-10-{day:02}T10:00:00+00:00">'
        f'<testcase classname="test.registered.test_eplb.TestEplb" name="test_a" time="{seconds}"/></testsuite>'
    )
    return name


@pytest.fixture
def suite_files(room: Room) -> Path:
    directory = room.path / "test" / "registered"
    directory.mkdir(parents=True)
    source = 'register_cuda_ci(est_time=100, suite="a")  # on three readings\nregister_amd_ci(est_time=90, suite="a")\n'
    (directory / "test_eplb.py").write_text(source)
    off = 'register_cuda_ci(est_time=1, suite="b", disabled="hangs")\n'
    (directory / "test_other.py").write_text(off + 'register_cuda_ci(est_time=50, suite="a")\n')
    return directory


def test_a_suite_of_others_is_calibrated_in_its_sources(room: Room, suite_files: Path) -> None:
    for day, seconds in enumerate((280, 277, 292), 1):
        junit(room.ledgers, seconds, day)
    flags = ["--machine", "nvidia-h200", "--registrations", str(suite_files)]
    before = {path.name: path.read_bytes() for path in suite_files.iterdir()}
    status, out, _ = room.run(*flags)
    assert status == 0
    assert "100 s -> 300 s (+200 %): 3 readings of 277 s to 292 s" in out
    status, _, err = room.run(*flags, "--check")
    assert (status, "test_eplb.py: off: est_time is 100 s, readings say 300 s" in err) == (1, True)
    assert {path.name: path.read_bytes() for path in suite_files.iterdir()} == before
    assert room.run(*flags, "--explain", "test_eplb.py")[0] == 0
    assert room.run(*flags, "--write")[0] == 0
    after = {path.name: path.read_bytes() for path in suite_files.iterdir()}
    assert after == before | {"test_eplb.py": before["test_eplb.py"].replace(b"est_time=100", b"est_time=300")}
    assert room.run(*flags, "--check")[0] == 0
    assert not room.times.exists(), "this suite's own estimates are not touched"


def test_a_suite_that_can_not_be_told_apart_is_refused(room: Room, suite_files: Path) -> None:
    junit(room.ledgers, 280, 1)
    flags = ["--machine", "nvidia-h200", "--registrations", str(suite_files)]
    assert "suites of cuda are a" in room.refused(2, *flags, "--suite", "b")
    assert "say so with --backend" in room.refused(2, *flags, "--machine", "quantum")
    (suite_files / "sub").mkdir()
    twin = suite_files / "sub" / "test_twice.py"
    twin.write_text('register_cuda_ci(est_time=1, suite="a")\nregister_cuda_ci(est_time=1, suite="b")\n')
    assert "test_twice.py:2: two registrations for cuda (a and b); choose with --suite" in room.refused(2, *flags)
    twin.write_text("register_cuda_ci(est_time=N)\n")
    assert "test_twice.py:1: register_cuda_ci: est_time is N; a plain number" in room.refused(2, *flags, "--write")
    twin.unlink()
    (suite_files / "test_eplb.py").rename(suite_files / "test_renamed.py")
    assert "readings are of other files: test/registered/test_eplb.py" in room.refused(3, *flags)
