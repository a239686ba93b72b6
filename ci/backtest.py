"""Do estimates made from earlier runs predict later ones? `python -m ci.backtest LEDGER`, on real runs.

The first half of the runs is calibrated as `ci.calibrate` does; the second half is held against it: seconds a class, launch
and tests apart, and the makespan of the whole suite on the workers it ran on.
"""

from __future__ import annotations

import argparse
import heapq
import statistics
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tabulate import tabulate

from ci.estimate import Estimate, estimate, percent
from ci.readings import Reading, by_class, machines
from ci.sources import SourceError, gather

FEWEST_RUNS = 6


class BacktestError(Exception):
    """Runs that can't be held against each other; the text is one line."""


@dataclass(frozen=True)
class ClassScore:
    """A class: its estimate, the medians of the runs it was held against, and their relative errors. Seconds."""

    name: str
    est_time: float
    whole: float
    launch: tuple[float | None, float]
    tests: tuple[float | None, float]
    errors: tuple[float, ...]


@dataclass(frozen=True)
class Backtest:
    """How one machine kind's second half of runs compares with estimates made from the first.

    `error`: median over classes and runs of |estimate - measured| / measured; `launch_error` and `tests_error` the same
    of the stages. `makespan`: predicted seconds on `workers`, and the measured ones of each later run.
    """

    machine: str
    runs: tuple[int, int]
    classes: tuple[ClassScore, ...]
    workers: int
    predicted: float
    makespans: tuple[float, ...]

    @property
    def error(self) -> float:
        """The median relative error of class times."""
        return statistics.median(error for score in self.classes for error in score.errors)

    @property
    def stage_errors(self) -> tuple[float, float]:
        """The median relative errors of launch and of tests, over classes, against their medians."""
        pairs = ([score.launch for score in self.classes], [score.tests for score in self.classes])
        launch, tests = (
            statistics.median(abs(told - seen) / seen for told, seen in stage if told is not None and seen > 0)
            for stage in pairs
        )
        return launch, tests

    @property
    def makespan_error(self) -> float:
        """The relative error of the makespan, against the median of the later runs."""
        measured = statistics.median(self.makespans)
        return abs(self.predicted - measured) / measured


def backtest(readings: Sequence[Reading], machine: str, workers: int) -> Backtest:
    """Hold the later half of a machine kind's whole passing runs against estimates from the earlier half.

    Raises `BacktestError` where there are too few runs.
    """
    runs = _whole_runs([reading for reading in readings if reading.machine == machine])
    if len(runs) < FEWEST_RUNS:
        raise BacktestError(f"{machine}: {len(runs)} whole passing runs, at least {FEWEST_RUNS} are needed")
    half = len(runs) // 2
    earlier = [reading for run in runs[:half] for reading in run]
    as_of = max(reading.time for reading in earlier)
    estimates: dict[str, Estimate] = {}
    for name, found in by_class(earlier, machine).items():
        made = estimate(found, as_of)
        if made is not None:
            estimates[name] = made
    later = by_class([reading for run in runs[half:] for reading in run], machine)
    scores = tuple(_score(name, estimates[name], later[name]) for name in sorted(estimates.keys() & later.keys()))
    if not scores:
        raise BacktestError(f"{machine}: no class has enough readings in the first half")
    predicted = list_schedule([score.est_time for score in scores], workers)
    return Backtest(
        machine, (half, len(runs) - half), scores, workers, predicted, tuple(_makespan(run) for run in runs[half:])
    )


def list_schedule(seconds: Iterable[float], workers: int) -> float:
    """Return the makespan of handing jobs out longest first, each to the worker that is free first, as the suite does."""
    free = [0.0] * workers
    for one in sorted(seconds, reverse=True):
        heapq.heapreplace(free, free[0] + one)
    return max(free)


def _whole_runs(readings: Sequence[Reading]) -> list[list[Reading]]:
    """Return the runs that passed and ran as many classes as the fullest, in order of time."""
    found: dict[str, list[Reading]] = {}
    for reading in readings:
        found.setdefault(reading.run, []).append(reading)
    fullest = max((len(run) for run in found.values()), default=0)
    whole = [run for run in found.values() if len(run) == fullest and all(r.outcome == "passed" for r in run)]
    return sorted(whole, key=lambda run: min(reading.time for reading in run))


def _score(name: str, made: Estimate, found: Sequence[Reading]) -> ClassScore:
    def middle(values: Iterable[float]) -> float:
        return statistics.median(values)

    return ClassScore(
        name=name,
        est_time=made.est_time,
        whole=middle(reading.seconds.whole for reading in found),
        launch=(made.launch, middle(reading.seconds.launch for reading in found)),
        tests=(made.tests, middle(reading.seconds.tests for reading in found)),
        errors=tuple(abs(made.est_time - reading.seconds.whole) / reading.seconds.whole for reading in found),
    )


def _makespan(run: Sequence[Reading]) -> float:
    """Return the seconds from the first class's start to the last one's end. A reading's time is its end."""
    starts: list[datetime] = [reading.time - timedelta(seconds=reading.seconds.whole) for reading in run]
    return (max(reading.time for reading in run) - min(starts)).total_seconds()


def render(result: Backtest) -> str:
    """Return the comparison as markdown."""
    rows = [
        [
            score.name,
            score.est_time,
            score.whole,
            percent(statistics.median(score.errors)),
            *(f"{told:.2f} / {seen:.2f}" if told is not None else "-" for told, seen in (score.launch, score.tests)),
        ]
        for score in result.classes
    ]
    headers = ["class", "estimate", "measured", "error", "launch, est / seen", "tests, est / seen"]
    launch, tests = result.stage_errors
    return "\n".join(
        [
            f"## {result.machine}: {result.runs[0]} runs estimated, {result.runs[1]} later ones held against them",
            "",
            tabulate(rows, headers=headers, tablefmt="github", floatfmt=".2f"),
            "",
            f"Seconds; medians. Class times: median error {percent(result.error)}; launch {percent(launch)}, tests"
            f" {percent(tests)}.",
            f"Makespan on {result.workers} workers: predicted {result.predicted:.1f} s, measured"
            f" {statistics.median(result.makespans):.1f} s ({min(result.makespans):.1f} to {max(result.makespans):.1f}),"
            f" error {percent(result.makespan_error)}.",
            "",
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Print the comparison for each machine kind; return 0, or 2 for bad input (one line on standard error)."""
    parser = argparse.ArgumentParser(
        prog="python -m ci.backtest",
        description="Estimate from the first half of recorded runs, and hold the second half against it.",
        epilog="example: python -m ci.backtest reports/ledger --output reports/est_time_backtest.md",
    )
    parser.add_argument("paths", nargs="+", metavar="LEDGER", help="ledgers, or directories of them")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="that the runs ran on (default: 2)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report there")
    arguments = parser.parse_args(argv)
    try:
        if arguments.workers < 1:
            raise BacktestError(f"--workers: {arguments.workers} given, at least 1 is needed")
        gathered = gather(arguments.paths, datetime.now().astimezone(), None)
        kinds = machines(gathered.readings)
        if not kinds:
            raise BacktestError(f"{arguments.paths[0]}: no readings; run the suite with --ledger first")
        found = [render(backtest(gathered.readings, machine, arguments.workers)) for machine in kinds]
    except (BacktestError, SourceError) as error:
        print(f"ci.backtest: {error}", file=sys.stderr)
        return 2
    shown = " ".join(["python -m ci.backtest", *arguments.paths])
    text = "\n".join(["# Estimates held against later runs", "", f"Printed by `{shown}`.", "", *found])
    print(text, end="")
    if arguments.output is not None:
        arguments.output.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
