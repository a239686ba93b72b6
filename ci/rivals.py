"""The splits that others make, to be compared with: longest-first greedy, and pytest-split's two algorithms.

Written anew from their descriptions: R. Graham (1969) for longest-first; the README and documentation of pytest-split
0.11 for `least_duration` and `duration_based_chunks`. pytest-split divides single tests; here both are given whole
classes, which favours them: a class that is cut in two would start its daemon twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence

#: A split: the runner of each class, in the order of the seconds that were given.
Splitter = Callable[[Sequence[float], int], list[int]]


def greedy_longest_first(seconds: Sequence[float], runners: int) -> list[int]:
    """Give the longest class that is left to the runner with the least so far."""
    loads, assignment = [0.0] * runners, [0] * len(seconds)
    for index in sorted(range(len(seconds)), key=lambda index: -seconds[index]):
        runner = loads.index(min(loads))
        assignment[index] = runner
        loads[runner] += seconds[index]
    return assignment


def least_duration(seconds: Sequence[float], runners: int) -> list[int]:
    """pytest-split's `least_duration`: by falling time, each to the group with the smallest sum, by a heap of groups."""
    groups, assignment = [(0.0, group) for group in range(runners)], [0] * len(seconds)
    for index in sorted(range(len(seconds)), key=lambda index: seconds[index], reverse=True):
        total, group = heapq.heappop(groups)
        assignment[index] = group
        heapq.heappush(groups, (total + seconds[index], group))
    return assignment


def duration_based_chunks(seconds: Sequence[float], runners: int) -> list[int]:
    """pytest-split's `duration_based_chunks`: in order; a group is left as soon as it has an even share of the time."""
    share, group, total, assignment = sum(seconds) / runners, 0, 0.0, []
    for one in seconds:
        if total >= share and group < runners - 1:
            group, total = group + 1, 0.0
        assignment.append(group)
        total += one
    return assignment


RIVALS: Mapping[str, Splitter] = {
    "longest-first greedy": greedy_longest_first,
    "pytest-split least_duration": least_duration,
    "pytest-split duration_based_chunks": duration_based_chunks,
}
