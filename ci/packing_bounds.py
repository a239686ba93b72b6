"""What no split can beat: lower bounds on the makespan, and on the number of runners for a capacity.

A capacity is refuted when some argument shows that the jobs don't fit the runners within it; the bound is the
smallest capacity that isn't. Sources: S. Martello, P. Toth, "Lower bounds and reduction procedures for the bin packing
problem", Discrete Applied Mathematics 28 (1990); S. Fekete, J. Schepers, "New classes of fast lower bounds for bin
packing problems", Mathematical Programming 91 (2001); M. Dell'Amico, S. Martello, "Optimal scheduling of tasks on
identical parallel processors", ORSA Journal on Computing 7 (1995), who use the first on makespans as is done here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from ci.packing_instance import Instance

#: Parameters of Fekete and Schepers' functions; larger ones tell sizes apart that seldom matter.
_STEPS = range(1, 25)


def makespan_bound(instance: Instance) -> int:
    """Return a makespan that no split of the instance is below, in milliseconds."""
    low = max(max(instance.whole), _average(instance), _pigeonhole(instance))
    low = _smallest(low, lambda capacity: _quick_bound(instance, capacity) <= instance.runners)
    # Dear, and seldom better: looked for only where the smallest capacity that is left can be refuted by it.
    return _smallest(low, lambda capacity: _runners_bound(instance, capacity) <= instance.runners)


def _smallest(low: int, fits: Callable[[int], bool]) -> int:
    """Return `low`, or a capacity of which the next smaller one does not fit, by doubling steps and bisection."""
    if fits(low):
        return low
    step = 1
    while not fits(low + step):
        low, step = low + step, 2 * step
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


def runners_bound(instance: Instance, capacity: int) -> int | None:
    """Return a number of runners that no split within `capacity` milliseconds is below; None where a job alone exceeds it."""
    return None if max(instance.whole) > capacity else _runners_bound(instance, capacity)


def _average(instance: Instance) -> int:
    """All the work, each group's setup once, spread evenly."""
    used = {group for groups in instance.groups for group in groups}
    return -(-(sum(instance.own) + sum(instance.setup[group] for group in used)) // instance.runners)


def _pigeonhole(instance: Instance) -> int:
    """Of the k*m+1 longest jobs some runner has k+1, which take at least as long as the k+1 shortest of them."""
    sizes, runners, best = sorted(instance.own, reverse=True), instance.runners, 0
    setup = min(whole - own for whole, own in zip(instance.whole, instance.own, strict=True))
    for k in range(1, (len(sizes) - 1) // runners + 1):
        last = k * runners
        best = max(best, setup + sum(sizes[last - k : last + 1]))
    return best


def _quick_bound(instance: Instance, capacity: int) -> int:
    return max(_by_volume(instance, capacity), _by_large_jobs(sorted(instance.own), _room(instance, capacity)))


def _runners_bound(instance: Instance, capacity: int) -> int:
    """The best of three arguments, for a capacity that holds each job with its setups.

    The last two pack own times: leaving setups out only lowers a bound.
    """
    return max(_quick_bound(instance, capacity), _by_dual_feasible(instance.own, _room(instance, capacity)))


def _room(instance: Instance, capacity: int) -> int:
    """Return what is left of a capacity for own times: the least setup that any job has is paid on every runner."""
    return capacity - min(whole - own for whole, own in zip(instance.whole, instance.own, strict=True))


def _by_volume(instance: Instance, capacity: int) -> int:
    """All the work, with each group's setup as often as the group has to be split to fit."""
    volume = sum(instance.own)
    members: dict[int, int] = {}
    for own, groups in zip(instance.own, instance.groups, strict=True):
        for group in groups:
            members[group] = members.get(group, 0) + own
    for group, own in members.items():
        volume += instance.setup[group] * -(-own // (capacity - instance.setup[group]))
    return -(-volume // capacity)


def _by_large_jobs(sizes: list[int], capacity: int) -> int:
    """Martello and Toth's L2: jobs over half the capacity take a runner each; what is left beside them takes the rest."""
    sums = [0, *accumulate(sizes)]
    half = bisect_right(sizes, capacity // 2)  # integers: size > capacity/2 is size > capacity//2
    best = len(sizes) - half
    for first in range(half):
        if first and sizes[first - 1] == sizes[first]:
            continue
        alone = bisect_right(sizes, capacity - sizes[first])  # from here on nothing of that size fits beside
        room = (alone - half) * capacity - (sums[alone] - sums[half])
        rest = sums[half] - sums[first] - room
        best = max(best, len(sizes) - half + max(0, -(-rest // capacity)))
    return best


def _by_dual_feasible(sizes: Sequence[int], capacity: int) -> int:
    """Fekete and Schepers' u^(k): sizes rounded to multiples of 1/k in a way that keeps every full runner at most full."""
    best = 0
    for k in _STEPS:
        total = 0
        for size in sizes:
            steps, rest = divmod((k + 1) * size, capacity)
            total += steps * capacity if rest else size * k
        best = max(best, -(-total // (capacity * k)))
    return best
