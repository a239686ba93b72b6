"""Ways to split jobs over identical runners, and to make a split better. Deterministic: no clock, and one fixed seed.

Sources: R. Graham, "Bounds on multiprocessing timing anomalies", SIAM J. Appl. Math. 17 (1969), for longest-first;
E. Coffman, M. Garey, D. Johnson, "An application of bin-packing to multiprocessor scheduling", SIAM J. Computing 7
(1978), for MultiFit; N. Karmarkar, R. Karp, "The differencing method of set partitioning", Berkeley CSD 82-113 (1982).
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable

from ci.packing_instance import Instance, Split

#: Bits of the subset sums in `halve`: sums are told apart to a 131,072nd of the two runners' time.
_RESOLUTION = 17
#: Steps of the exact search: some tenths of a second at worst, and far more than a dozen jobs need.
EXACT_NODES = 20_000
#: Rounds of `rebuild` for few jobs, the runners that each empties beside the longest, and the exchanges that end it.
_REBUILDS, _EMPTIED, _EXCHANGES = 100, 3, 8


def longest_first(instance: Instance) -> list[int]:
    """Return Graham's split: the longest job that is left goes to the runner that ends it first. Setups are counted."""
    split = Split(instance)
    for job in instance.longest_first:
        place(split, job)
    return split.assignment


def place(split: Split, job: int) -> None:
    """Give a job to the runner that ends it first."""
    split.put(
        job, min(range(split.instance.runners), key=lambda runner: split.loads[runner] + split.added(job, runner))
    )


def multifit(instance: Instance, assignment: list[int], enough: int) -> list[int]:
    """Return a split that is as good or better: the smallest capacity in which first-fit decreasing packs the jobs.

    Capacities from `enough` milliseconds to the makespan of `assignment` are tried, by bisection to a thousandth. Jobs
    also go group by group where that packs tighter.
    """
    orders = [list(instance.longest_first)]
    if any(instance.groups):
        orders.append(_by_group(instance))
    best, low, high, step = assignment, enough, instance.makespan(assignment), max(1, enough // 1000)
    while low < high:
        middle = (low + high) // 2
        found = next(filter(None, (_first_fit(instance, order, middle) for order in orders)), None)
        if found is None:
            low = middle + step
        else:
            best, high = found, min(middle, instance.makespan(found))
    return best


def _first_fit(instance: Instance, order: Iterable[int], capacity: int) -> list[int] | None:
    split = Split(instance)
    for job in order:
        for runner in range(instance.runners):
            if split.loads[runner] + split.added(job, runner) <= capacity:
                split.put(job, runner)
                break
        else:
            return None
    return split.assignment


def _by_group(instance: Instance) -> list[int]:
    """Jobs of a group in a row, the heaviest group first; a job of several groups goes by the one with the longest setup."""
    main = [
        max(groups, key=lambda group: instance.setup[group], default=-1 - job)
        for job, groups in enumerate(instance.groups)
    ]
    weight: dict[int, int] = {}
    for job, group in enumerate(main):
        weight[group] = weight.get(group, 0) + instance.own[job]
    return sorted(instance.longest_first, key=lambda job: (-weight[main[job]], main[job]))


def differencing(instance: Instance) -> list[int]:
    """Return Karmarkar and Karp's split by largest differences, for any number of runners. It doesn't look at setups."""
    empty: list[tuple[int, list[int]]] = [(0, [])] * (instance.runners - 1)
    heap = [(-instance.whole[job], job, [(instance.whole[job], [job]), *empty]) for job in range(len(instance.own))]
    heapq.heapify(heap)
    serial = len(heap)
    while len(heap) > 1:
        _, _, one = heapq.heappop(heap)
        _, _, other = heapq.heappop(heap)
        merged = [(a + b, jobs + more) for (a, jobs), (b, more) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], serial, merged))
        serial += 1
    assignment = [0] * len(instance.own)
    for runner, (_, jobs) in enumerate(heap[0][2]):
        for job in jobs:
            assignment[job] = runner
    return assignment


def improve(instance: Instance, assignment: list[int], enough: int) -> list[int]:
    """Return a split that is as good or better: the longest runner shares its jobs anew with another while that shortens it.

    Ends at a makespan of `enough` milliseconds, or where neither sharing anew nor a move or a swap of two jobs helps.
    """
    split = Split(instance, assignment)
    while split.makespan > enough:
        longest = split.longest
        others = sorted(set(range(instance.runners)) - {longest}, key=lambda runner: split.loads[runner])
        if not any(_share_anew(split, longest, other) for other in others) and not exchange(split):
            break
    return split.assignment


def _share_anew(split: Split, longest: int, other: int) -> bool:
    """Halve what two runners hold; do it where both then end before the longer one does now. Groups stay whole."""
    if split.loads[other] >= split.loads[longest] - 1:
        return False
    units = _units(split.instance, split.held[longest] + split.held[other])
    chosen = halve([size for size, _ in units])
    one = [job for index, (_, jobs) in enumerate(units) if index in chosen for job in jobs]
    two = [job for index, (_, jobs) in enumerate(units) if index not in chosen for job in jobs]
    if sum(split.runner_of[job] == longest for job in one) < sum(split.runner_of[job] == longest for job in two):
        one, two = two, one  # more stay where they are
    if max(split.instance.load(one), split.instance.load(two)) >= split.loads[longest]:
        return False
    for job in one + two:
        split.take(job)
    for runner, jobs in ((longest, one), (other, two)):
        for job in jobs:
            split.put(job, runner)
    return True


def _units(instance: Instance, jobs: list[int]) -> list[tuple[int, list[int]]]:
    """Return jobs that hang together by groups, as load and members."""
    parts: list[tuple[set[int], list[int]]] = []
    for job in jobs:
        groups, members = set(instance.groups[job]), [job]
        apart = []
        for part in parts:
            if groups & part[0]:
                groups, members = groups | part[0], part[1] + members
            else:
                apart.append(part)
        parts = [*apart, (groups, members)]
    return [(instance.load(members), members) for _, members in parts]


def halve(sizes: list[int]) -> set[int]:
    """Return the indices of a part whose sum is as near to half of all as can be, from below; sums to one 2^17th of all."""
    unit = max(1, sum(sizes) >> _RESOLUTION)
    scaled = [size // unit for size in sizes]
    half = sum(scaled) // 2
    mask = (1 << half + 1) - 1
    reachable = [1]  # bit s of entry i: the first i sizes have a part of sum s
    for size in scaled:
        reachable.append((reachable[-1] | reachable[-1] << size) & mask)
    rest = reachable[-1].bit_length() - 1
    chosen = set()
    for index in range(len(sizes) - 1, -1, -1):
        if not reachable[index] >> rest & 1:
            chosen.add(index)
            rest -= scaled[index]
    return chosen


def exchange(split: Split, ceiling: int | None = None) -> bool:
    """Do the one move, or swap of two jobs, that best shortens the longest runner; return whether there was one.

    A move that brings both runners to `ceiling` milliseconds or below is taken before any swap: it moves one job, not two.
    """
    longest = split.longest
    before = split.loads[longest]
    best: tuple[int, int, int, int | None] | None = (
        None  # the longer load afterwards, the other runner, job out, job in
    )
    for swap in (False, True):
        for other in range(split.instance.runners):
            if other == longest or split.loads[other] >= before:
                continue
            for out in split.held[longest]:
                for into in split.held[other] if swap else (None,):
                    left = split.exchanged(longest, out, into)
                    if left >= before or (best and left >= best[0]):
                        continue
                    longer = max(left, split.exchanged(other, into, out))
                    if longer < before and (best is None or longer < best[0]):
                        best = (longer, other, out, into)
        if best and ceiling is not None and best[0] <= ceiling:
            break  # one job moves, not two
    if best is None:
        return False
    _, other, out, into = best
    split.take(out)
    if into is not None:
        split.take(into)
        split.put(into, longest)
    split.put(out, other)
    return True


def exact(instance: Instance, assignment: list[int], bound: int) -> tuple[list[int], bool]:
    """Return the best split found by branch and bound, and whether it is proven optimal.

    `assignment` is the split to beat, `bound` a makespan known to be unbeatable; at most `EXACT_NODES` jobs are placed.
    """
    best, limit = list(assignment), instance.makespan(assignment)
    order = instance.longest_first
    split, left = Split(instance), EXACT_NODES
    remaining = [0] * (len(order) + 1)
    for depth in range(len(order) - 1, -1, -1):
        remaining[depth] = remaining[depth + 1] + instance.own[order[depth]]

    def search(depth: int) -> bool:
        """Return whether everything below this node was looked at or ruled out."""
        nonlocal best, limit, left
        if limit <= bound:
            return True
        if depth == len(order):
            best, limit = split.assignment, split.makespan
            return True
        if -(-(sum(split.loads) + remaining[depth]) // instance.runners) >= limit:
            return True
        job = order[depth]
        seen: set[tuple[int, int, frozenset[int]]] = set()
        for runner in sorted(range(instance.runners), key=lambda runner: split.loads[runner]):
            added, load = split.added(job, runner), split.loads[runner]
            # Runners of one load that hold the same groups are interchangeable.
            state = (load, added, frozenset(group for held in split.held[runner] for group in instance.groups[held]))
            if load + added >= limit or state in seen:
                continue
            seen.add(state)
            if left <= 0:
                return False
            left -= 1
            split.put(job, runner)
            whole = search(depth + 1)
            split.take(job)
            if not whole:
                return False
        return True

    finished = search(0)
    return best, finished


def rebuild(instance: Instance, assignment: list[int], enough: int) -> list[int]:
    """Return a split that is as good or better: the longest runner and some others are emptied and filled again, often.

    Their jobs are placed longest first, near ones in a shuffled order of a fixed seed, and exchanged; a split that is
    hardly longer is gone on from, the best is kept. Large instances are left alone: local search is near their bound, and
    a round is dear. Source: G. Schrimpf et al., "Record breaking optimization results using the ruin and recreate
    principle", J. Computational Physics 159 (2000).
    """
    draw = random.Random(len(assignment))
    current = best = list(assignment)
    for _ in range(max(0, _REBUILDS - len(assignment) // 2)):
        if instance.makespan(best) <= enough:
            break
        split = Split(instance, current)
        emptied = [split.longest, *draw.sample(range(instance.runners), min(instance.runners, _EMPTIED))]
        jobs = [job for job in range(len(current)) if current[job] in emptied]
        for job in jobs:
            split.take(job)
        for job in sorted(jobs, key=lambda job: -instance.whole[job] * draw.uniform(0.7, 1)):
            place(split, job)
        for _ in range(_EXCHANGES):
            if not exchange(split):
                break
        if split.makespan <= instance.makespan(current) * 1.002:
            current = split.assignment
            if split.makespan < instance.makespan(best):
                best = current
    return best
