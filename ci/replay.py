"""Replay a history: before each day estimates are made from what was known by then, and the day's runs are split by them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ci.estimate import Estimate, estimate
from ci.history import History
from ci.packing import Job, pack, renumbered
from ci.packing_bounds import makespan_bound
from ci.packing_instance import Instance
from ci.policy import DEFAULT_POLICY, Policy
from ci.readings import Reading
from ci.rivals import RIVALS, Splitter

Table = NDArray[np.float64]
#: Readings handed to the estimator, as a multiple of its window: what is left out (failed, busy) leaves it full.
_WINDOWS = 2
#: A class is over its estimate when it takes more than this many times as long.
OVER = 1.5


@dataclass(frozen=True)
class Estimates:
    """What was expected of each class, `[steps, classes]`, in seconds; NaN where nothing was known.

    `timeout` likewise, NaN where the estimator gives none. `name` says who made them.
    """

    name: str
    est_time: Table
    timeout: Table


@dataclass(frozen=True)
class EstimatorScore:
    """How good estimates were. `class_days`: how many could be judged, of classes that had an estimate and passed.

    `error`: median of the relative error of a run. `over`: part of the class-days on which a run took more than `OVER`
    times its estimate. `missed`: part of the passing runs that the time-out would have ended, NaN where there is none.
    `rewritten`: part of the estimates that changed, a day.
    """

    name: str
    class_days: int
    error: float
    over: float
    missed: float
    rewritten: float


@dataclass(frozen=True)
class SplitScore:
    """How good splits were, over the days of a history.

    `times`: by which times was split. `planned`, `planned_worst`: mean and largest ratio of the makespan to the lower
    bound, both by those times. `ran`, `ran_p95`: mean and 95th percentile of the same by the times that the runs took.
    `moved`: classes a day that changed their runner; where a split is made anew, its runners are renumbered so that few do.
    """

    name: str
    times: str
    planned: float
    planned_worst: float
    ran: float
    ran_p95: float
    moved: float


def calibrated(history: History, policy: Policy = DEFAULT_POLICY) -> Estimates:
    """Return the estimates that `ci.calibrate` would have had before each step."""
    shape = (len(history.steps), len(history.classes))
    est_time, timeout = np.full(shape, np.nan), np.full(shape, np.nan)
    known: list[list[Reading]] = [[] for _ in history.classes]
    kept: list[Estimate | None] = [None] * len(history.classes)
    for step, (rows, as_of) in enumerate(zip(history.steps, history.as_of, strict=True)):
        for column, readings in enumerate(known):
            if readings:
                last = kept[column] = estimate(readings[-_WINDOWS * policy.window :], as_of, policy, kept[column])
                if last is not None:
                    est_time[step, column], timeout[step, column] = last.est_time, last.timeout
        for row in rows:
            for column, reading in enumerate(history.readings[row]):
                if reading is not None:
                    known[column].append(reading)
    return Estimates("ci.calibrate", est_time, timeout)


def simple(history: History, window: int = DEFAULT_POLICY.window) -> Iterator[Estimates]:
    """Yield the estimates of plain statistics of the passing readings: the last, and quantiles of the last `window`."""
    passed = passing(history)
    parts = {f"median of {window}": 0.5, f"75th percentile of {window}": 0.75, f"90th percentile of {window}": 0.9}
    tables = {name: np.full((len(history.steps), len(history.classes)), np.nan) for name in ("last", *parts)}
    newest = np.full((window, len(history.classes)), np.nan)  # the newest first, NaN where there are fewer
    for step, rows in enumerate(history.steps):
        tables["last"][step] = newest[0]
        ordered, count = np.sort(newest, axis=0), np.sum(~np.isnan(newest), axis=0)
        for name, part in parts.items():
            place = part * np.maximum(count - 1, 0)
            below = place.astype(int)
            above = np.minimum(below + 1, np.maximum(count - 1, 0))
            low, high = (np.take_along_axis(ordered, index[None], axis=0)[0] for index in (below, above))
            tables[name][step] = low + (place - below) * (high - low)
        for row in rows:
            new = ~np.isnan(passed[row])
            newest[1:, new] = newest[:-1, new]
            newest[0, new] = passed[row, new]
    for name, table in tables.items():
        yield Estimates(name, table, np.full_like(table, np.nan))


def known_levels(history: History) -> Estimates | None:
    """Return the true levels as estimates: what nobody can do better than, spikes and noise being what they are."""
    if history.level is None:
        return None
    table = np.array([history.level[rows[0]] for rows in history.steps])
    return Estimates("true level (unknowable)", table, np.full_like(table, np.nan))


def passing(history: History) -> Table:
    """Return the history's seconds, NaN also where a reading isn't of a passing class."""
    mask = [[reading is not None and reading.outcome == "passed" for reading in row] for row in history.readings]
    return np.where(np.array(mask), history.seconds, np.nan)


def score_estimates(history: History, estimates: Estimates) -> EstimatorScore:
    """Return how good some estimates were. Runs that didn't pass are no measurement, and aren't judged."""
    passed = passing(history)
    errors: list[Table] = []
    days = over = runs = missed = 0
    for step, rows in enumerate(history.steps):
        expected, limit, took = estimates.est_time[step], estimates.timeout[step], passed[list(rows)]
        judged = ~np.isnan(took) & ~np.isnan(expected)
        errors.append((np.abs(took - expected) / took)[judged])
        days += int(judged.any(axis=0).sum())
        over += int((judged & (took > OVER * np.nan_to_num(expected))).any(axis=0).sum())
        runs += int(judged.sum())
        missed += int((judged & (took > np.nan_to_num(limit, nan=np.inf))).sum())
    before, after = estimates.est_time[:-1], estimates.est_time[1:]
    both = ~np.isnan(before) & ~np.isnan(after)
    return EstimatorScore(
        name=estimates.name,
        class_days=days,
        error=float(np.median(np.concatenate(errors))) if days else np.nan,
        over=over / days if days else np.nan,
        missed=missed / runs if runs and not np.isnan(estimates.timeout).all() else np.nan,
        rewritten=float((before != after)[both].mean()) if both.any() else np.nan,
    )


def score_splits(
    history: History, estimates: Estimates, runners: int, rivals: Mapping[str, Splitter] = RIVALS
) -> list[SplitScore]:
    """Return how good the project's splits were, near the previous day's and anew, and each rival's, by the same estimates.

    Each step's first run is split. A class that nothing is known of counts as much as the median of the others. The times
    of a run are those of all its readings, passed or not.
    """
    splitters: dict[str, Splitter | None] = {"ci.shard --previous": None, "ci.shard": _packed, **rivals}
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in splitters}
    moves: dict[str, list[int]] = {name: [] for name in splitters}
    before: dict[str, dict[str, int]] = {name: {} for name in splitters}
    for step, rows in enumerate(history.steps):
        columns = np.flatnonzero(~np.isnan(history.seconds[rows[0]]))
        expected, took = estimates.est_time[step, columns], history.seconds[rows[0], columns]
        if np.isnan(expected).all():
            continue
        expected = np.where(np.isnan(expected), np.nanmedian(expected), expected)
        planned_bound, ran_bound = _bound(expected, runners), _bound(took, runners)
        for name, splitter in splitters.items():
            there = [before[name].get(history.classes[column], -1) for column in columns]
            if splitter is None:
                assignment = _packed(expected.tolist(), runners, there)
            else:
                assignment = renumbered(splitter(expected.tolist(), runners), there, runners)
            ratios[name].append(
                (_longest(expected, assignment) / planned_bound, _longest(took, assignment) / ran_bound)
            )
            if before[name]:
                moves[name].append(sum(old not in (-1, new) for old, new in zip(there, assignment, strict=True)))
            before[name] = {history.classes[column]: new for column, new in zip(columns, assignment, strict=True)}
    return [
        _split_score(name, estimates.name, np.array(ratios[name]), moves[name]) for name in splitters if ratios[name]
    ]


def _split_score(name: str, times: str, ratios: Table, moves: list[int]) -> SplitScore:
    planned, ran = ratios[:, 0], ratios[:, 1]
    return SplitScore(
        name=name,
        times=times,
        planned=float(planned.mean()),
        planned_worst=float(planned.max()),
        ran=float(ran.mean()),
        ran_p95=float(np.quantile(ran, 0.95)),
        moved=float(np.mean(moves)) if moves else np.nan,
    )


def _packed(seconds: Sequence[float], runners: int, before: Sequence[int] = ()) -> list[int]:
    jobs = [Job(str(index), one) for index, one in enumerate(seconds)]
    packing = pack(jobs, runners, previous={str(index): runner for index, runner in enumerate(before)})
    runner = {job.name: number for number, held in enumerate(packing.shards) for job in held}
    return [runner[job.name] for job in jobs]


def _bound(seconds: Table, runners: int) -> float:
    own = tuple(max(1, round(1000 * float(one))) for one in seconds)
    return makespan_bound(Instance(own, ((),) * len(own), (), runners)) / 1000


def _longest(seconds: Table, assignment: list[int]) -> float:
    return float(np.bincount(assignment, weights=seconds).max())
