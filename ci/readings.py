"""A reading: how long one test class took, once, on one machine. What estimates are made from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime

from matrix.ledger import LedgerContents, Run, Seconds


@dataclass(frozen=True)
class Reading:
    """One run of one class.

    `class_name`: the unit that is estimated; a class of this suite, or a class or file of another. `machine`: its kind
    (`nvidia-h200`, `cpu-2core`). `outcome`: `passed`, `failed`, `skipped` or `error`. `seconds`: launch, tests, teardown
    and the whole; a source that tells no stages apart has all of it in tests. `time`: the end, with a time zone.
    `revision`: of the code under test. `run`: an id that readings of one run share. `world_size`: ranks.
    `load`: the machine's 1-minute load average a core when the class began. `warm`: whether what it needs was in the
    cache by then. `attempt`: 1 for a first try. None where unknown. `run_began`: the time of its run's header.
    """

    class_name: str
    machine: str
    outcome: str
    seconds: Seconds
    time: datetime
    revision: str = ""
    run: str = ""
    world_size: int = 1
    load: float | None = None
    warm: bool | None = None
    attempt: int = 1
    run_began: datetime | None = None

    def __post_init__(self) -> None:
        if self.time.tzinfo is None:
            raise ValueError(f"{self.class_name}: time {self.time} has no time zone")


def readings_of(contents: LedgerContents) -> tuple[Reading, ...]:
    """Return the readings of a ledger, in its order, whatever their outcome."""
    return tuple(reading for run in contents.runs for reading in _of_run(run))


def machines(readings: Iterable[Reading]) -> tuple[str, ...]:
    """Return the machine kinds of some readings, sorted."""
    return tuple(sorted({reading.machine for reading in readings}))


def by_class(readings: Iterable[Reading], machine: str) -> dict[str, Sequence[Reading]]:
    """Return one machine kind's readings by class, both sorted (readings by time)."""
    found: dict[str, list[Reading]] = {}
    for reading in sorted(readings, key=lambda one: (one.class_name, one.time, one.run)):
        if reading.machine == machine:
            found.setdefault(reading.class_name, []).append(reading)
    return dict(found)


def _of_run(run: Run) -> Iterable[Reading]:
    for record in run.records:
        yield Reading(
            class_name=record.class_name,
            machine=record.machine,
            outcome=record.outcome,
            seconds=record.seconds,
            time=record.time,
            revision=record.revision,
            run=record.run,
            world_size=record.world_size,
            load=record.load,
            warm=record.warm,
            attempt=record.attempt or 1,
            run_began=run.header.time if run.header else None,
        )
