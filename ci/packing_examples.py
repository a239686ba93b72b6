"""Packing problems of fixed seeds, by which splitters are compared and timed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ci.packing import Job

#: Classes and runners; the last is the largest that is promised.
SIZES = ((12, 3), (24, 4), (40, 8), (70, 32), (100, 8), (100, 32), (250, 16), (500, 8), (500, 32))
#: A draw of one class's seconds by kind of suite. `even` and `wide` have little slack to hide a bad split in.
KINDS: Mapping[str, Callable[[random.Random], float]] = {
    "skewed": lambda draw: draw.lognormvariate(4, 0.7),
    "even": lambda draw: draw.uniform(90, 110),
    "wide": lambda draw: draw.uniform(20, 100),
}


@dataclass(frozen=True)
class Example:
    """Jobs to be split over `runners`; `kind` says how their seconds were drawn."""

    kind: str
    jobs: tuple[Job, ...]
    runners: int

    @property
    def seconds(self) -> list[float]:
        """Each job's seconds."""
        return [job.seconds for job in self.jobs]


def examples(seed: int = 1) -> Iterator[Example]:
    """Yield an example of every size and kind; the same ones for the same seed."""
    for classes, runners in SIZES:
        for kind, seconds in KINDS.items():
            draw = random.Random(f"{seed}/{classes}/{runners}/{kind}")
            jobs = tuple(Job(f"class{number}", round(seconds(draw), 3)) for number in range(classes))
            yield Example(kind, jobs, runners)
