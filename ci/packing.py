"""Classes to identical runners: the shortest split that can be found, a bound on how much shorter any could be, few moves.

A split is made from scratch (longest-first, MultiFit, differencing, then local search, and an exact search where there are
few jobs), and where there was a split before, from that one by as few moves as keep the makespan within `slack` of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ci.packing_bounds import makespan_bound, runners_bound
from ci.packing_instance import Instance, Split
from ci.packing_search import differencing, exact, exchange, improve, longest_first, multifit, place, rebuild

#: How much longer than the lower bound a split may be so that fewer classes move; half of it beyond the best split found.
DEFAULT_SLACK = 0.015
#: Jobs up to which branch and bound is always tried, and up to which it is where the split isn't near the bound.
_FEW_JOBS, _SOME_JOBS = 12, 40
#: A split this near to the bound (a thousandth of it) is not worked on further: estimates are never that good.
_NEAR = 1000

#: Milliseconds by which a deadline of decimal seconds may be off in binary: 1.001 s is a little less than 1001 of them.
_ROUNDING = 1e-6


class PackingError(ValueError):
    """Jobs or numbers that make no packing problem; the text is one line that names them."""


class DeadlineError(PackingError):
    """A deadline that no number of runners can meet; the text names the job that exceeds it alone."""


@dataclass(frozen=True)
class Job:
    """What is never cut in two: a class.

    `seconds` is its time on a runner where it shares nothing. `groups` names what it shares with others (a daemon, a
    checkpoint); of jobs of a group that are on one runner, all but the first take the group's saving less.
    """

    name: str
    seconds: float
    groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packing:
    """A split. `shards`: each runner's jobs, in the order in which they were given. `seconds`: each runner's time.

    `lower_bound`, in seconds: no split on as many runners is shorter. `moved`: jobs that have another runner than before;
    new ones don't count.
    """

    shards: tuple[tuple[Job, ...], ...]
    seconds: tuple[float, ...]
    lower_bound: float
    moved: int = 0

    @property
    def makespan(self) -> float:
        """The longest runner's time, in seconds."""
        return max(self.seconds)

    @property
    def gap(self) -> float:
        """How much longer than the lower bound the split is, as a fraction; the optimum is at most this much shorter."""
        return self.makespan / self.lower_bound - 1


@dataclass(frozen=True)
class Fewest:
    """How many runners a deadline takes: `packing` meets it on as many as it has, `at_least` is proven to be needed."""

    packing: Packing
    at_least: int


def pack(
    jobs: Sequence[Job],
    runners: int,
    savings: Mapping[str, float] | None = None,
    previous: Mapping[str, int] | None = None,
    slack: float = DEFAULT_SLACK,
) -> Packing:
    """Split jobs over at most `runners` runners; the same arguments give the same split.

    `savings`: seconds by group; a group that isn't named saves nothing. `previous`: runner by job name, from 0; what it
    says of other jobs or runners is of no consequence. Without it the split is never longer than longest-first's; with it
    jobs move only where it would otherwise be both `slack` longer than the lower bound and half of that longer than the
    best split found. With more runners than jobs, some runners stay empty. Raises `PackingError`.
    """
    if runners < 1:
        raise PackingError(f"runners: {runners} given; at least 1 is needed")
    if not 0 <= slack < 1:
        raise PackingError(f"slack: {slack} given; it is a fraction from 0 to below 1")
    instance = _instance(jobs, runners, savings or {})
    bound = makespan_bound(instance)
    fresh, proven = _from_scratch(instance, bound)
    if proven:
        bound = instance.makespan(fresh)
    before = [(previous or {}).get(job.name, -1) for job in jobs]
    before = [runner if 0 <= runner < runners else -1 for runner in before]
    settled = _settle(instance, fresh, bound, before, slack) if max(before) >= 0 else fresh
    return _packing(jobs, instance, settled, bound, before)


def fewest_runners(
    jobs: Sequence[Job],
    deadline: float,
    savings: Mapping[str, float] | None = None,
    previous: Mapping[str, int] | None = None,
    slack: float = DEFAULT_SLACK,
) -> Fewest:
    """Split jobs over as few runners as end within `deadline` seconds.

    Raises `DeadlineError` where one job alone takes longer, `PackingError` for bad input.
    """
    if not (math.isfinite(deadline) and deadline > 0):
        raise PackingError(f"deadline: {deadline} s given; it is a positive number of seconds")
    capacity = math.floor(deadline * 1000 + _ROUNDING)
    instance = _instance(jobs, 1, savings or {})
    at_least = runners_bound(instance, capacity)
    if at_least is None:
        job = jobs[instance.longest_first[0]]
        raise DeadlineError(
            f"no split ends within {deadline:g} s: {job.name} alone takes {job.seconds:g} s; "
            "raise the deadline or make two classes of that one"
        )
    runners = at_least
    while True:
        packing = pack(jobs, runners, savings, previous, slack)
        if round(packing.makespan * 1000) > capacity and previous:
            # Moves may be spared only where the deadline allows it.
            packing = pack(jobs, runners, savings, previous, slack=0)
        if round(packing.makespan * 1000) <= capacity:
            return Fewest(packing, at_least)
        if round(packing.lower_bound * 1000) > capacity:
            at_least = runners + 1
        runners += 1


def _instance(jobs: Sequence[Job], runners: int, savings: Mapping[str, float]) -> Instance:
    """Return the problem in milliseconds. Raises `PackingError`."""
    if not jobs:
        raise PackingError("no classes to split")
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        raise PackingError(f"class {next(name for name in names if names.count(name) > 1)} is given more than once")
    for group, saving in savings.items():
        if not (math.isfinite(saving) and saving >= 0):
            raise PackingError(f"saving of {group}: {saving} s given; it is a number of seconds, 0 or more")
    used = sorted({group for job in jobs for group in job.groups if savings.get(group)})
    index = {group: number for number, group in enumerate(used)}
    setup = tuple(_milliseconds(savings[group]) for group in used)
    groups = tuple(tuple(sorted({index[group] for group in job.groups if group in index})) for job in jobs)
    own = []
    for job, shared in zip(jobs, groups, strict=True):
        if not (math.isfinite(job.seconds) and job.seconds > 0):
            raise PackingError(f"class {job.name}: {job.seconds} s given; a class takes a positive number of seconds")
        own.append(_milliseconds(job.seconds) - sum(setup[group] for group in shared))
        if own[-1] <= 0:
            raise PackingError(
                f"class {job.name}: takes {job.seconds:g} s, but {', '.join(job.groups)} would save "
                f"{sum(savings.get(group, 0) for group in set(job.groups)):g} s of them; a saving is less than the class"
            )
    return Instance(tuple(own), groups, setup, runners)


def _milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _from_scratch(instance: Instance, bound: int) -> tuple[list[int], bool]:
    """Return the best split found, and whether it is proven to be the best there is."""
    enough = bound + bound // _NEAR
    best = improve(instance, longest_first(instance), enough)
    for attempt in (multifit, _by_differencing, rebuild):
        if instance.makespan(best) > enough:
            best = min(best, improve(instance, attempt(instance, best, enough), enough), key=instance.makespan)
    makespan = instance.makespan(best)
    if makespan > bound and len(instance.own) <= (_SOME_JOBS if makespan > enough else _FEW_JOBS):
        return exact(instance, best, bound)
    return best, makespan == bound


def _by_differencing(instance: Instance, _best: list[int], _enough: int) -> list[int]:
    return differencing(instance)


def _settle(instance: Instance, fresh: list[int], bound: int, before: list[int], slack: float) -> list[int]:
    """Return a split that leaves as many jobs as it can where they were, and is at most as long as `slack` allows.

    Two ways are tried: the split there was, mended by a move or a swap at a time, then by two runners at a time; and
    `fresh`, its runners numbered so that most of their jobs were there before.
    """
    ceiling = math.floor(max(bound * (1 + slack), instance.makespan(fresh) * (1 + slack / 2)))
    split = Split(instance)
    for job, runner in enumerate(before):
        if runner >= 0:
            split.put(job, runner)
    for job in instance.longest_first:
        if before[job] < 0:
            place(split, job)
    while split.makespan > ceiling and exchange(split, ceiling):
        pass
    mended = improve(instance, split.assignment, ceiling)
    anew = renumbered(fresh, before, instance.runners)
    if instance.makespan(mended) > ceiling or _moved(anew, before) < _moved(mended, before):
        return anew
    return mended


def renumbered(fresh: list[int], before: list[int], runners: int) -> list[int]:
    """Return `fresh` with each runner numbered as the one it has most jobs in common with; the greatest overlaps go first.

    `before` is the runner that each job had, -1 where it is new.
    """
    overlap: dict[tuple[int, int], int] = {}
    for new, old in zip(fresh, before, strict=True):
        if old >= 0:
            overlap[new, old] = overlap.get((new, old), 0) + 1
    number: dict[int, int] = {}
    for new, old in sorted(overlap, key=lambda pair: (-overlap[pair], pair)):
        if new not in number and old not in number.values():
            number[new] = old
    free = iter(runner for runner in range(runners) if runner not in number.values())
    for new in range(runners):
        if new not in number:
            number[new] = next(free)
    return [number[runner] for runner in fresh]


def _moved(assignment: Sequence[int], before: Sequence[int]) -> int:
    return sum(old not in (-1, new) for new, old in zip(assignment, before, strict=True))


def _packing(jobs: Sequence[Job], instance: Instance, assignment: list[int], bound: int, before: list[int]) -> Packing:
    held: list[list[int]] = [[] for _ in range(instance.runners)]
    for job, runner in enumerate(assignment):
        held[runner].append(job)
    return Packing(
        shards=tuple(tuple(jobs[job] for job in part) for part in held),
        seconds=tuple(instance.load(part) / 1000 for part in held),
        lower_bound=bound / 1000,
        moved=_moved(assignment, before),
    )
