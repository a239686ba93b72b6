"""Options, markers and the ledger, on classes that start nothing."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from conformance.suite import SUITE
from matrix.generate import cells
from matrix.ledger import Record, Run, read
from matrix.space import load_space

pytest_plugins = ["pytester"]

TARGET = """
name = "miniature"
version = ["{python}", "-c", "print('1.2.3')"]
[daemon]
command = ["false"]
ready = 'ready: (?P<ranks>\\d+)'
[server]
command = ["false"]
ready = 'ready: (?P<url>\\S+)'
"""
MODULE = """
import os
import pytest
from conformance.world_size import world_size_mark
from conformance.requirement import requirement
from conformance.targets import DidNotStart
from matrix.generate import cells
from matrix.space import load_space

class Base:
    @requirement("WC-SELF-001", level="must", does="Nothing is done.", expects="Nothing happens.")
    def test_first(self):
        assert FIRST

    @requirement("WC-SELF-002", level="must", does="Nothing is done.", expects="Nothing happens.")
    def test_second(self, ending):
        pass

    @pytest.fixture
    def ending(self):
        START
        yield

for cell in cells(load_space()):
    marks = {"pytestmark": [world_size_mark(cell.layout.world_size)], "cell": cell}
    globals()[cell.class_name] = type(cell.class_name, (Base,), marks)
del Base
"""
SMOKE = cells(load_space(), "smoke")


@pytest.fixture
def suite(pytester: pytest.Pytester) -> pytest.Pytester:
    (pytester.path / "mini.toml").write_text(TARGET)
    return pytester


def run_module(suite: pytest.Pytester, *arguments: str, first: str = "True", start: str = "pass") -> pytest.RunResult:
    suite.makepyfile(test_mini=MODULE.replace("FIRST", first).replace("START", start))
    return suite.runpytest_subprocess(
        "--target", "mini.toml", "--ledger", "ledger.jsonl", "--strict-markers", *arguments
    )


def only_run(suite: pytest.Pytester) -> Run:
    contents = read([suite.path / "ledger.jsonl"])
    assert not contents.problems
    (run,) = contents.runs
    return run


def without_times(record: Record) -> Record:
    return msgspec.structs.replace(record, run="", seconds=None, time=None, load=None)  # type: ignore[arg-type]


def test_ledger_is_complete(suite: pytest.Pytester) -> None:
    run_module(suite).assert_outcomes(passed=2 * len(SMOKE), deselected=2 * (len(cells(load_space())) - len(SMOKE)))
    run = only_run(suite)
    assert run.header is not None
    assert run.header.cells == [cell.id for cell in SMOKE]
    assert (run.header.target, run.header.target_version) == ("miniature", "1.2.3")
    assert run.footer is not None
    assert (run.footer.records, run.footer.exit_status) == (len(SMOKE), 0)
    assert [record.cell for record in run.records] == [cell.id for cell in SMOKE]
    for record in run.records:
        assert (record.outcome, record.reason) == ("passed", "")
        assert record.requirements == {"WC-SELF-001": "passed", "WC-SELF-002": "passed"}
        assert record.seconds.whole >= 0


@pytest.mark.parametrize("case", [("True", "pass"), ("not 'Client'", "raise DidNotStart('no')"), ("True", "1 / 0")])
def test_two_workers_write_the_same_ledger(suite: pytest.Pytester, case: tuple[str, str]) -> None:
    ledgers = []
    for workers in ("-n0", "-n2"):
        run_module(suite, workers, first=case[0], start=case[1])
        run = only_run(suite)
        ledgers.append(sorted(map(without_times, run.records), key=lambda record: record.cell))
        assert run.footer is not None
        assert run.footer.records == len(SMOKE)
        assert run.header is not None
        assert sorted(run.header.cells) == sorted(cell.id for cell in SMOKE)
        (suite.path / "ledger.jsonl").unlink()
    assert ledgers[0] == ledgers[1]


def test_tier_chooses_cells(suite: pytest.Pytester) -> None:
    run_module(suite, "--tier", "full", "--device", "cpu")
    assert [record.cell for record in only_run(suite).records] == [cell.id for cell in cells(load_space(), "full")]
    result = run_module(suite, "--tier", "none")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --tier: *'none'*smoke*"])


@pytest.mark.parametrize("size", [1, 2])
def test_markers_select_by_world_size(suite: pytest.Pytester, size: int) -> None:
    run_module(suite, "-m", f"{size}gpu")
    expected = [cell.id for cell in SMOKE if cell.layout.world_size == size]
    assert expected
    assert [record.cell for record in only_run(suite).records] == expected


def test_unknown_world_size_is_refused(suite: pytest.Pytester) -> None:
    assert run_module(suite, "-m", "3gpu").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.parametrize(
    ("first", "start", "outcome", "told"),
    [
        ("False", "pass", "failed", "WC-SELF-001: *False*"),
        ("True", "raise DidNotStart('no GPU')", "failed", "WC-SELF-002: no GPU"),
        ("True", "raise RuntimeError('our mistake')", "error", "WC-SELF-002: our mistake"),
        ("False", "raise RuntimeError('our mistake')", "error", "WC-SELF-002: our mistake"),
        ("True", "pytest.skip('not here')", "skipped", "WC-SELF-002: *not here*"),
        ("True", "yield; raise RuntimeError('at the end')", "error", "WC-SELF-002: at the end"),
    ],
)
def test_outcome_is_that_of_the_worst_requirement(
    suite: pytest.Pytester, first: str, start: str, outcome: str, told: str
) -> None:
    if "yield" in start:
        start += "\n        return"
    name = SMOKE[0].class_name
    run_module(suite, f"test_mini.py::{name}", first=first, start=start)
    (record,) = only_run(suite).records
    assert record.outcome == outcome
    assert Path(record.reason).match(told) or record.reason == told, record.reason


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
def test_part_of_a_class_is_no_pass(suite: pytest.Pytester, workers: str) -> None:
    run_module(suite, "-k", "test_first", workers)
    for record in only_run(suite).records:
        assert record.outcome == "skipped"
        assert record.requirements == {"WC-SELF-001": "passed"}
        assert record.reason == "not run: WC-SELF-002"


def test_stopping_early_records_the_class_it_stopped_at(suite: pytest.Pytester) -> None:
    run_module(suite, "-x", first="False")
    run = only_run(suite)
    (record,) = run.records
    assert (record.outcome, record.requirements) == ("failed", {"WC-SELF-001": "failed"})
    assert run.footer is not None
    assert (run.footer.records, run.footer.exit_status) == (1, 1)


def test_other_tests_are_left_alone(suite: pytest.Pytester) -> None:
    suite.makepyfile("def test_one(): pass\nclass TestTwo:\n    def test_two(self): pass")
    result = suite.runpytest_subprocess("--ledger", "ledger.jsonl", "--target", "nowhere.toml")
    result.assert_outcomes(passed=2)
    assert not (suite.path / "ledger.jsonl").exists()
    result.stdout.no_fnmatch_line("*target*")


@pytest.mark.parametrize("workers", ["-n0", "-n2"])
@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("--target=nobody", "ERROR: --target: *nobody.toml: no such target; there are *reference*"),
        ("--tier=none", "ERROR: --tier: no tier 'none' in the space; there are smoke*"),
    ],
)
def test_bad_option_is_refused_before_anything_starts(
    pytester: pytest.Pytester, option: str, told: str, workers: str
) -> None:
    result = pytester.runpytest_subprocess(option, workers, "-p", "no:cacheprovider", str(SUITE / "test_cells.py"))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([told])
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
