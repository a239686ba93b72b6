"""The simulation: histories are what their regime says, scores are what can be computed by hand, the report is stable."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from ci import simulate
from ci.history import REGIMES, START, History, Regime, recorded, synthetic
from ci.readings import Reading
from ci.replay import (
    Estimates,
    calibrated,
    known_levels,
    passing,
    score_estimates,
    score_splits,
    simple,
)
from matrix.generate import cells
from matrix.ledger import Footer, Header, Ledger, Record, Seconds
from matrix.space import load_space

QUIET = Regime("quiet", "nothing happens", noise=0, run_noise=0, drift=0, spikes=0, failures=0)
ROOT = Path(__file__).parents[2]


def stages(whole: float) -> Seconds:
    return Seconds(launch=0.0, tests=whole, teardown=0.0, whole=whole)


def reading(name: str, whole: float, run: int, outcome: str = "passed") -> Reading:
    return Reading(
        class_name=name,
        machine="m",
        outcome=outcome,
        seconds=stages(whole),
        time=START + timedelta(days=run),
        run=str(run),
    )


def history(*runs: dict[str, float], failed: tuple[int, str] | None = None) -> History:
    return recorded(
        "by hand",
        [
            reading(name, whole, run, "failed" if (run, name) == failed else "passed")
            for run, classes in enumerate(runs)
            for name, whole in classes.items()
        ],
    )


def estimates(rows: list[list[float]], timeout: float = math.nan) -> Estimates:
    table = np.array(rows, dtype=np.float64)
    return Estimates("by hand", table, np.full_like(table, timeout))


# histories


def test_a_history_is_its_seed() -> None:
    one, same, other = (synthetic(REGIMES[1], 10, 20, 2, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.seconds, same.seconds, equal_nan=True)
    assert one.readings == same.readings
    assert not np.array_equal(one.seconds, other.seconds)
    assert not np.array_equal(one.seconds, synthetic(REGIMES[0], 10, 20, 2, 1).seconds)


def test_a_quiet_suite_takes_its_level() -> None:
    quiet = synthetic(QUIET, 10, 20, 2, 1)
    assert quiet.level is not None
    assert np.allclose(quiet.seconds, quiet.level, atol=1e-3)
    assert np.ptp(quiet.seconds, axis=0).max() == 0
    assert len(quiet.steps) == len(quiet.as_of) == 20
    assert [row for step in quiet.steps for row in step] == list(range(40))


def rates(**changed: float) -> tuple[History, History]:
    """A quiet year, and one with something changed, of many classes."""
    fields = {"noise": 0, "run_noise": 0, "drift": 0, "spikes": 0, "failures": 0} | changed
    changed_regime = Regime("quiet", "changed", **fields)
    return synthetic(QUIET, 40, 365, 2, 1), synthetic(changed_regime, 40, 365, 2, 1)


def test_rates_are_kept() -> None:
    quiet, spiky = rates(spikes=0.02)
    assert np.mean(spiky.seconds > 1.59 * quiet.seconds) == pytest.approx(0.02, rel=0.1)
    quiet, shifting = rates(shifts=2)
    steps = np.diff(np.log(shifting.seconds), axis=0)
    jumps = np.abs(steps) > np.log(1.19)
    assert jumps.sum() / 40 == pytest.approx(2, rel=0.3)
    assert np.mean(steps[jumps] > 0) == pytest.approx(2 / 3, abs=0.12)
    quiet, slow = rates(slow_runs=0.05)
    busy = (slow.seconds > 1.29 * quiet.seconds).all(axis=1)
    assert busy.mean() == pytest.approx(0.05, rel=0.4)
    loads = np.array([row[0].load for row in slow.readings if row[0]])
    assert (loads[busy] > 2).all()
    assert (loads[~busy] < 1).all()
    _, noisy = rates(noise=0.1)
    assert np.log(noisy.seconds).std(axis=0).mean() == pytest.approx(0.1, rel=0.1)
    _, wandering = rates(drift=0.02)
    assert np.diff(np.log(wandering.seconds[::2]), axis=0).std() == pytest.approx(0.02, rel=0.1)
    _, failing = rates(failures=0.05)
    assert np.isnan(passing(failing)).mean() == pytest.approx(0.05, rel=0.1)
    _, growing = rates(newcomers=0.5, leavers=0.25)
    assert np.isnan(growing.seconds[0]).mean() == pytest.approx(0.5, abs=0.2)
    assert np.isnan(growing.seconds[-1]).mean() == pytest.approx(0.25, abs=0.2)
    readings = [[one is None for one in row] for row in growing.readings]
    assert np.array_equal(np.array(readings), np.isnan(growing.seconds))


def test_recorded_runs_are_steps() -> None:
    found = history({"a": 1, "b": 2}, {"a": 3}, {"b": 4})
    assert found.classes == ("a", "b")
    assert np.array_equal(found.seconds, [[1, 2], [3, math.nan], [math.nan, 4]], equal_nan=True)
    assert found.steps == ((0,), (1,), (2,))
    assert list(found.as_of) == sorted(found.as_of)
    assert found.level is None
    assert known_levels(found) is None
    with pytest.raises(ValueError, match="nothing: no readings"):
        recorded("nothing", [])


# estimates


def test_nothing_is_known_of_the_future() -> None:
    """Up to each step, the estimates are the same whatever comes after it."""
    whole = synthetic(REGIMES[1], 6, 40, 2, 3)
    cut = synthetic(REGIMES[1], 6, 40, 2, 3)
    changed = cut.seconds.copy()
    changed[50:] *= 7
    later = tuple(
        row if number < 50 else tuple(one and replace(one, seconds=stages(7 * one.seconds.whole)) for one in row)
        for number, row in enumerate(cut.readings)
    )
    cut = History(cut.name, cut.classes, changed, None, later, cut.steps, cut.as_of)
    for one, other in zip((calibrated(whole), *simple(whole)), (calibrated(cut), *simple(cut)), strict=True):
        assert np.array_equal(one.est_time[:26], other.est_time[:26], equal_nan=True), one.name
        assert np.isnan(one.est_time[0]).all()
    before, after = next(simple(whole)), next(simple(cut))
    assert not np.array_equal(before.est_time[26:], after.est_time[26:])


def test_simple_statistics_by_hand() -> None:
    runs = history(*({"a": float(one)} for one in (1, 2, 3, 4, 5, 6)), failed=(4, "a"))
    last, median, upper, _ = simple(runs, window=4)
    assert last.est_time[:, 0].tolist()[1:] == [1, 2, 3, 4, 4]
    assert median.est_time[:, 0].tolist()[1:] == [1, 1.5, 2, 2.5, 2.5]
    assert upper.est_time[5, 0] == pytest.approx(3.25)


def test_a_constant_class_is_estimated_as_it_is() -> None:
    found = calibrated(synthetic(QUIET, 5, 30, 2, 1))
    score = score_estimates(synthetic(QUIET, 5, 30, 2, 1), found)
    assert score.over == score.missed == 0
    assert score.error < 0.05
    assert np.isfinite(found.timeout[1:]).all()


def test_scores_by_hand() -> None:
    runs = history({"a": 10, "b": 10}, {"a": 10, "b": 16}, {"a": 20, "b": 15}, {"a": 10, "b": 40}, failed=(3, "b"))
    score = score_estimates(runs, estimates([[math.nan, math.nan], [10, 10], [10, 10], [8, 10]], timeout=18))
    assert score.class_days == 5, "nothing was known at first, and what failed is no measurement"
    assert score.over == pytest.approx(2 / 5), "16 and 20 are over 15; 15 is not"
    assert score.missed == pytest.approx(1 / 5)
    assert score.error == pytest.approx(1 / 3)
    assert score.rewritten == pytest.approx(1 / 4)


def test_the_promise_holds_in_small() -> None:
    """A year of shifts, of fewer classes than in the report."""
    year = synthetic(REGIMES[1], 25, 365, 2, 1)
    score = score_estimates(year, calibrated(year))
    assert score.class_days > 9000
    assert 0 < score.over <= 0.01
    assert score.missed < 0.001


# splits


def test_splits_by_hand() -> None:
    """Three runners; estimates say 5, 5, 4, 4, 3, 3, 3 for seven classes, which take that: 9 s is the optimum."""
    seconds = dict(zip("abcdefg", (5.0, 5.0, 4.0, 4.0, 3.0, 3.0, 3.0), strict=True))
    runs = history(seconds, seconds, seconds)
    known = list(seconds.values())
    scores = {one.name: one for one in score_splits(runs, estimates([[math.nan] * 7, known, known]), 3)}
    greedy = scores["longest-first greedy"]
    assert greedy.planned == greedy.planned_worst == greedy.ran == greedy.ran_p95 == pytest.approx(11 / 9)
    assert greedy.moved == 0
    assert scores["ci.shard"].planned == scores["ci.shard --previous"].planned == 1
    assert scores["pytest-split least_duration"].planned == greedy.planned
    assert scores["pytest-split duration_based_chunks"].planned == pytest.approx(11 / 9), "5 5 | 4 4 3 | 3 3"


def test_wrong_estimates_show_in_what_ran_alone() -> None:
    runs = history({"a": 9, "b": 9, "c": 1, "d": 1})
    (right,) = score_splits(runs, estimates([[9, 9, 1, 1]]), 2, {})[:1]
    assert right.planned == right.ran == 1
    (wrong,) = score_splits(runs, estimates([[8, 2, 4, 6]]), 2, {})[:1]
    assert wrong.planned == 1, "8 + 2 | 4 + 6"
    assert wrong.ran == pytest.approx(1.8), "9 + 9 | 1 + 1"


def test_moves_are_counted() -> None:
    seconds = {"a": 10.0, "b": 8.0, "c": 6.0, "d": 4.0}
    runs = history(seconds, seconds)
    scores = {one.name: one for one in score_splits(runs, estimates([[10, 8, 6, 4], [4, 8, 6, 10]]), 2)}
    # 10 + 4 | 8 + 6 both days: the greedy split is the same set of classes.
    assert scores["longest-first greedy"].moved == 0
    scores = {one.name: one for one in score_splits(runs, estimates([[10, 8, 6, 4], [10, 4, 6, 8]]), 2)}
    assert scores["longest-first greedy"].moved == 2
    assert scores["ci.shard --previous"].moved == 2, "10 + 4 | 8 + 6 must become 10 + 4 | 6 + 8"


def test_our_splits_stay_near_and_near_the_bound() -> None:
    days = synthetic(REGIMES[1], 60, 40, 1, 2)
    scores = {one.name: one for one in score_splits(days, calibrated(days), 6)}
    near, anew, greedy = (scores[name] for name in ("ci.shard --previous", "ci.shard", "longest-first greedy"))
    assert near.planned_worst <= 1.03
    assert near.moved < anew.moved / 3
    assert anew.planned <= greedy.planned
    assert scores["pytest-split duration_based_chunks"].planned > greedy.planned


# the command


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert simulate.main(arguments) == 0
    return capsys.readouterr().out


def test_the_report_is_its_seed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--regime", "growing", "--classes", "12", "--days", "20", "--runners", "3")
    path = tmp_path / "report.md"
    first = run(*arguments, "--output", str(path), capsys=capsys)
    assert path.read_text() == first
    again = run(*arguments, "--output", str(path), capsys=capsys)
    assert again == first
    other = run(*arguments, "--output", str(path), "--seed", "2", capsys=capsys)
    assert other != first
    assert "| ci.shard --previous " in first
    assert re.search(r"\| fixed problems, worst +\| 1\.0300 +\| 1\.\d{4} +\| yes +\|", first)


def write_ledger(path: Path, runs: int) -> None:
    cell = cells(load_space(), "smoke")[0]
    ledger = Ledger(path)
    for number in range(runs):
        time, name = START + timedelta(hours=number), f"run{number}"
        common = {"run": name, "revision": "r", "machine": "cpu-2core", "device": "cpu", "target": "reference"}
        ledger.append(Header(time=time, target_version="1", **common))
        for suffix in ("A", "B"):
            seconds = Seconds(launch=1.0, tests=float(number % 2), teardown=0.5, whole=1.5 + number % 2)
            ledger.append(
                Record(
                    cell=cell.id,
                    class_name=f"Test{suffix}",
                    outcome="passed",
                    target_version="1",
                    requirements={},
                    layout_hashes=[],
                    digests_digest=[],
                    seconds=seconds,
                    world_size=1,
                    transport=cell.transport,
                    mode=cell.mode,
                    model=cell.model,
                    time=time + timedelta(minutes=5),
                    **common,
                )
            )
        ledger.append(Footer(run=name, time=time + timedelta(minutes=6), records=2, exit_status=0))


def test_a_ledger_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.jsonl"
    write_ledger(path, 8)
    out = run("--ledger", str(path), "--runners", "2", capsys=capsys)
    assert "## cpu-2core" in out
    assert "Recorded: 8 runs of 2 classes." in out
    assert "true level (unknowable)" not in out
    assert "fixed problems" not in out
    assert re.search(r"\| last +\| 14 ", out), "two classes, and nothing known before the first run"


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (lambda path: None, "No such file"),
        (lambda path: path.write_text(""), "no readings to replay"),
        (lambda path: path.write_text("what is this"), "no ledger"),
    ],
)
def test_a_ledger_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str], write: object, text: str) -> None:
    path = tmp_path / "ledger.jsonl"
    write(path)  # type: ignore[operator]
    assert simulate.main(["--ledger", str(path)]) == 2
    error = capsys.readouterr().err
    assert text.lower() in error.lower()
    assert error.startswith("ci.simulate: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [("--days", "0"), ("--classes", "-1"), ("--runners", "x"), ("--regime", "stormy"), ("--seed", "")]
)
def test_arguments_that_make_no_sense(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        simulate.main(arguments)
    assert caught.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_the_committed_report_is_of_the_documented_command() -> None:
    text = (ROOT / "reports/shard_simulation.md").read_text()
    assert "Printed by `python -m ci.simulate --output reports/shard_simulation.md`; seed 1" in text
    for regime in REGIMES:
        assert f"## {regime.name}\n" in text
    promised = dict(re.findall(r"^\| ([a-z].*?): class-days over +\|.*\| (yes|no) +\|$", text, re.MULTILINE))
    assert promised["shifts"] == promised["calm"] == promised["growing"] == "yes"
