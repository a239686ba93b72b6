"""Histories of a suite's runs: synthetic ones, drawn from a regime and a seed, and recorded ones, from ledgers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import numpy as np
from numpy.typing import NDArray

from ci.readings import Reading
from matrix.ledger import Seconds

#: Where a synthetic year begins.
START = datetime(2026, 1, 1, tzinfo=UTC)
#: Part of a synthetic class's time that starting processes takes.
_LAUNCH = 0.25


@dataclass(frozen=True)
class Regime:
    """How the times of a suite behave. Rates are probabilities, sizes are relative, `noise` and such are log-normal sigmas.

    `noise`: of each reading; `run_noise`: of a run as a whole. `drift`: of a class's level, a day. `shifts`: changes of
    level a class and year, two in three upwards, by 20 % to 150 %. `spikes`: of readings, 1.6 to 4 times their level.
    `slow_runs`: of runs, 1.3 to 1.9 times as long on a busy machine, whose load is in the reading. `failures`: of
    readings. `newcomers`, `leavers`: of classes that come or go during the history.
    """

    name: str
    description: str
    noise: float = 0.06
    run_noise: float = 0.03
    drift: float = 0.002
    shifts: float = 0.0
    spikes: float = 0.001
    slow_runs: float = 0.0
    failures: float = 0.01
    newcomers: float = 0.0
    leavers: float = 0.0


REGIMES = (
    Regime("calm", "noise of 6 %, slow drift"),
    Regime("shifts", "calm, and each class changes its level twice a year, by 20 % to 150 %", shifts=2),
    Regime(
        "growing",
        "shifts, and a third of the classes come during the year, a tenth go",
        shifts=2,
        newcomers=0.33,
        leavers=0.1,
    ),
    Regime("drifting", "levels wander by 2 % a day", drift=0.02),
    Regime("spiky", "noise of 12 %, and 2 % of readings are 1.6 to 4 times too long", noise=0.12, spikes=0.02),
    Regime("slow machines", "shifts, and one run in 20 takes 1.3 to 1.9 times as long", shifts=2, slow_runs=0.05),
)


@dataclass(frozen=True)
class History:
    """Runs of a suite on one machine kind, in the order of time.

    `seconds`: `[runs, classes]`, NaN where a class wasn't run. `level`: the same without noise, spikes and busy machines:
    what an estimator could know at best; None where it is unknown. `readings[run][class]`: None where not run. `steps`:
    each has the runs between two calibrations; `as_of[step]` is when the one before it was made.
    """

    name: str
    classes: tuple[str, ...]
    seconds: NDArray[np.float64]
    level: NDArray[np.float64] | None
    readings: tuple[tuple[Reading | None, ...], ...]
    steps: tuple[tuple[int, ...], ...]
    as_of: tuple[datetime, ...]


def synthetic(regime: Regime, classes: int, days: int, runs_a_day: int, seed: int) -> History:
    """Return a history of a regime; the same for the same arguments."""
    draw = np.random.default_rng([seed, *regime.name.encode()])
    runs = days * runs_a_day
    shape = (runs, classes)
    base = np.clip(draw.lognormal(np.log(60), 0.8, classes), 5, 900)
    steps = draw.normal(0, regime.drift / np.sqrt(runs_a_day), shape)
    shifted = draw.random(shape) < regime.shifts / 365 / runs_a_day
    sizes = draw.uniform(np.log(1.2), np.log(2.5), shape) * np.where(draw.random(shape) < 2 / 3, 1, -1)
    level = base * np.exp(np.cumsum(steps + shifted * sizes, axis=0))
    busy = draw.random(runs) < regime.slow_runs
    run = np.exp(draw.normal(0, regime.run_noise, runs)) * np.where(busy, draw.uniform(1.3, 1.9, runs), 1)
    spike = np.where(draw.random(shape) < regime.spikes, draw.uniform(1.6, 4, shape), 1)
    seconds = level * run[:, None] * spike * np.exp(draw.normal(0, regime.noise, shape))
    failed = draw.random(shape) < regime.failures
    seconds = np.where(failed, seconds * draw.uniform(0.1, 1, shape), seconds)
    born = np.where(draw.random(classes) < regime.newcomers, draw.integers(0, runs, classes), 0)
    gone = np.where(draw.random(classes) < regime.leavers, draw.integers(0, runs, classes), runs)
    there = (np.arange(runs)[:, None] >= born) & (np.arange(runs)[:, None] < gone)
    seconds = np.where(there, np.round(seconds, 3), np.nan)
    load = np.where(busy, draw.uniform(2.5, 4, runs), draw.uniform(0.2, 0.8, runs))
    names = tuple(f"TestClass{number:03}" for number in range(classes))
    readings = tuple(
        tuple(
            _reading(
                names[column], float(seconds[row, column]), bool(failed[row, column]), row, runs_a_day, float(load[row])
            )
            if there[row, column]
            else None
            for column in range(classes)
        )
        for row in range(runs)
    )
    return History(
        name=regime.name,
        classes=names,
        seconds=seconds,
        level=level,
        readings=readings,
        steps=tuple(tuple(range(day * runs_a_day, (day + 1) * runs_a_day)) for day in range(days)),
        as_of=tuple(START + timedelta(days=day) for day in range(days)),
    )


def recorded(name: str, readings: Iterable[Reading]) -> History:
    """Return the history of some readings of one machine kind: a calibration before each run. Raises ValueError for none.

    A class that has several readings in a run keeps the last. Runs go by the time of their first reading.
    """
    by_run: dict[str, list[Reading]] = {}
    for reading in sorted(readings, key=lambda reading: reading.time):
        by_run.setdefault(reading.run, []).append(reading)
    if not by_run:
        raise ValueError(f"{name}: no readings")
    names = tuple(sorted({reading.class_name for run in by_run.values() for reading in run}))
    column = {one: number for number, one in enumerate(names)}
    seconds = np.full((len(by_run), len(names)), np.nan)
    table: list[list[Reading | None]] = [[None] * len(names) for _ in by_run]
    for row, run in enumerate(by_run.values()):
        for reading in run:
            seconds[row, column[reading.class_name]] = reading.seconds.whole
            table[row][column[reading.class_name]] = reading
    return History(
        name=name,
        classes=names,
        seconds=seconds,
        level=None,
        readings=tuple(map(tuple, table)),
        steps=tuple((row,) for row in range(len(by_run))),
        # Before the first class of the run ended: what other runs knew by then.
        as_of=tuple(run[0].time - timedelta(seconds=1) for run in by_run.values()),
    )


def _reading(name: str, whole: float, failed: bool, row: int, runs_a_day: int, load: float) -> Reading:
    launch = round(_LAUNCH * whole, 3)
    return Reading(
        class_name=name,
        machine="simulated",
        outcome="failed" if failed else "passed",
        seconds=Seconds(launch=launch, tests=round(whole - launch, 3), teardown=0.0, whole=whole),
        time=START + timedelta(days=(row + 0.5) / runs_a_day),
        revision=f"r{row}",
        run=f"run{row}",
        load=load,
        warm=True,
    )
