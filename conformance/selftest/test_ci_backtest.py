"""Estimates from earlier runs held against later ones."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ci.backtest import BacktestError, backtest, list_schedule, main, render
from ci.readings import Reading
from matrix.ledger import Seconds

BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
CLASSES = {"TestA": 10.0, "TestB": 6.0, "TestC": 5.0}


def runs(count: int, seconds: Callable[[int, float], float] = lambda _, usual: usual) -> list[Reading]:
    """Whole runs of three classes on two workers: A alone on one, then B and C on the other."""
    found = []
    for number in range(count):
        at = BEGAN + timedelta(hours=number)
        clock = {"TestA": 0.0, "TestB": 0.0, "TestC": seconds(number, CLASSES["TestB"])}
        for name, usual in CLASSES.items():
            whole = seconds(number, usual)
            found.append(
                Reading(
                    class_name=name,
                    machine="cpu-2core",
                    outcome="passed",
                    seconds=Seconds(launch=whole / 4, tests=whole / 2, teardown=whole / 4, whole=whole),
                    time=at + timedelta(seconds=clock[name] + whole),
                    run=f"r{number}",
                )
            )
    return found


def test_steady_runs_are_predicted() -> None:
    result = backtest(runs(10), "cpu-2core", 2)
    assert result.runs == (5, 5)
    assert result.error == pytest.approx(0, abs=0.01)
    assert result.stage_errors == pytest.approx((0, 0), abs=0.02)
    assert result.predicted == pytest.approx(11.0, abs=0.1)
    assert result.makespans == pytest.approx([11.0] * 5)
    assert "median error 0 %" in render(result)


def test_a_suite_that_became_slower_half_way_is_seen_to_be_mispredicted() -> None:
    """The check can fail: a later half that takes twice as long is an error of a half."""
    result = backtest(runs(10, lambda number, usual: usual * (2 if number >= 5 else 1)), "cpu-2core", 2)
    assert result.error == pytest.approx(0.5, abs=0.01)
    assert result.makespan_error == pytest.approx(0.5, abs=0.01)


def test_only_whole_passing_runs_count() -> None:
    found = runs(8)
    found[0] = Reading(**{**vars(found[0]), "outcome": "failed"})
    del found[4]
    assert backtest(found, "cpu-2core", 2).runs == (3, 3)


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(BacktestError, match="cpu-2core: 5 whole passing runs, at least 6"):
        backtest(runs(5), "cpu-2core", 2)


@given(st.lists(st.floats(0.1, 100), min_size=1, max_size=12), st.integers(1, 5))
def test_list_schedule_lies_between_its_bounds(seconds: list[float], workers: int) -> None:
    makespan = list_schedule(seconds, workers)
    bound = max(max(seconds), sum(seconds) / workers)
    assert bound - 1e-9 <= makespan <= sum(seconds) / workers + max(seconds) + 1e-9


@pytest.mark.parametrize(
    ("argv", "said"),
    [(["/nowhere.jsonl"], "/nowhere.jsonl"), (["/nowhere.jsonl", "--workers", "0"], "--workers: 0")],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], said: str) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
