"""A split that is ready to be run: its shards, what is expected of them, and the proof that it is one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ci.class_times import ClassTime
from ci.packing import Packing

#: A job's limit lets every class take this many times its estimate, and one of them run into its own time-out.
_LIMIT_FACTOR = 1.5


class NotAPartitionError(Exception):
    """Shards that leave a class out, have one twice, or have one that wasn't to be split. The text names the classes."""


@dataclass(frozen=True)
class Shard:
    """What one runner does. `number` counts from 1 to `count`; `seconds` is what it is expected to take, start included."""

    number: int
    count: int
    classes: tuple[ClassTime, ...]
    seconds: float
    timeout_minutes: int

    @property
    def name(self) -> str:
        """The shard's name within its split: `2/4`."""
        return f"{self.number}/{self.count}"

    @property
    def nodeids(self) -> tuple[str, ...]:
        """What pytest is to run."""
        return tuple(one.nodeid for one in self.classes)


@dataclass(frozen=True)
class Plan:
    """A split of classes over runners of one machine kind.

    `labels`: what a service chooses a runner by. `pytest_arguments` follow the node ids. Times are seconds, and include
    `overhead`, what a runner spends before its first class. `moved`: classes on another shard than before, None where
    there was no split before. `at_least`: the proven number of runners that `deadline` needs, None without a deadline.
    """

    machine: str
    labels: tuple[str, ...]
    shards: tuple[Shard, ...]
    lower_bound: float
    overhead: float = 0.0
    pytest_arguments: tuple[str, ...] = ()
    moved: int | None = None
    deadline: float | None = None
    at_least: int | None = None

    @property
    def classes(self) -> tuple[ClassTime, ...]:
        """Every class, by shard."""
        return tuple(one for shard in self.shards for one in shard.classes)

    @property
    def makespan(self) -> float:
        """What the longest shard is expected to take, in seconds."""
        return max(shard.seconds for shard in self.shards)


def shards_of(packing: Packing, classes: Sequence[ClassTime], overhead: float) -> tuple[Shard, ...]:
    """Return the shards of a packing, checked. One that would be empty is left out: pytest without node ids runs everything.

    Raises `NotAPartitionError`.
    """
    by_name = {one.name: one for one in classes}
    held = [(jobs, seconds) for jobs, seconds in zip(packing.shards, packing.seconds, strict=True) if jobs]
    shards = []
    for number, (jobs, seconds) in enumerate(held, 1):
        members = tuple(by_name[job.name] for job in jobs)
        shards.append(Shard(number, len(held), members, seconds + overhead, _limit(members, seconds, overhead)))
    check_partition([shard.nodeids for shard in shards], [one.nodeid for one in classes])
    return tuple(shards)


def check_partition(shards: Sequence[Sequence[str]], whole: Sequence[str]) -> None:
    """Prove that each of `whole` is in exactly one shard, and nothing else in any. Raises `NotAPartitionError`."""
    counted, wanted = Counter(one for shard in shards for one in shard), set(whole)
    for what, wrong in (
        ("in no shard", wanted - counted.keys()),
        ("in more than one place", {one for one, times in counted.items() if times > 1}),
        ("not among what was to be split", counted.keys() - wanted),
    ):
        if wrong:
            raise NotAPartitionError(f"the shards are no partition: {', '.join(sorted(wrong))} {what}")


def _limit(classes: Sequence[ClassTime], seconds: float, overhead: float) -> int:
    """Return the minutes after which a job is to be stopped: later than any class that hangs would be."""
    excess = max(one.timeout - one.seconds for one in classes)
    return math.ceil((overhead + _LIMIT_FACTOR * seconds + excess) / 60)
