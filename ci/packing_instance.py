"""The packing problem in whole milliseconds, and a split of it that is being worked on.

Scheduling on identical machines with a setup for each family (P | s_f | C_max): a runner pays a group's setup once,
however many of the group's jobs it holds. Without groups it is plain P || C_max.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Instance:
    """Jobs by index. `own`: a job's time without the setups of its groups, in milliseconds; `setup`: of each group.

    `groups` holds the indices of each job's groups, `runners` how many identical runners there are.
    """

    own: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    setup: tuple[int, ...]
    runners: int

    @cached_property
    def whole(self) -> tuple[int, ...]:
        """A job's time where it shares nothing with its runner's other jobs, in milliseconds."""
        return tuple(
            own + sum(self.setup[g] for g in groups) for own, groups in zip(self.own, self.groups, strict=True)
        )

    @cached_property
    def longest_first(self) -> tuple[int, ...]:
        """The jobs, longest first; of equal ones the first first."""
        return tuple(sorted(range(len(self.own)), key=lambda job: -self.whole[job]))

    def load(self, jobs: Iterable[int]) -> int:
        """Return how long one runner takes over some jobs, in milliseconds."""
        jobs = list(jobs)
        shared = {group for job in jobs for group in self.groups[job]}
        return sum(self.own[job] for job in jobs) + sum(self.setup[group] for group in shared)

    def makespan(self, assignment: Sequence[int]) -> int:
        """Return the longest runner's time, in milliseconds. `assignment` is the runner of each job."""
        held: list[list[int]] = [[] for _ in range(self.runners)]
        for job, runner in enumerate(assignment):
            held[runner].append(job)
        return max(self.load(jobs) for jobs in held)


class Split:
    """An assignment under way: who holds what, and each runner's load in milliseconds, kept up to date."""

    def __init__(self, instance: Instance, assignment: Sequence[int] | None = None) -> None:
        self.instance = instance
        self.runner_of: list[int] = [-1] * len(instance.own)
        self.held: list[list[int]] = [[] for _ in range(instance.runners)]
        self.loads: list[int] = [0] * instance.runners
        self._present: list[list[int]] = [[0] * len(instance.setup) for _ in range(instance.runners)]  # jobs by group
        for job, runner in enumerate(assignment or ()):
            self.put(job, runner)

    @property
    def makespan(self) -> int:
        """The longest runner's load."""
        return max(self.loads)

    @property
    def longest(self) -> int:
        """The runner with the longest load; of equal ones the first."""
        return self.loads.index(self.makespan)

    @property
    def assignment(self) -> list[int]:
        """The runner of each job."""
        return list(self.runner_of)

    def added(self, job: int, runner: int) -> int:
        """Return what a job would add to a runner's load."""
        load, present = self.instance.own[job], self._present[runner]
        for group in self.instance.groups[job]:
            if not present[group]:
                load += self.instance.setup[group]
        return load

    def put(self, job: int, runner: int) -> None:
        """Give a job that no runner has to one."""
        self.loads[runner] += self.added(job, runner)
        for group in self.instance.groups[job]:
            self._present[runner][group] += 1
        self.held[runner].append(job)
        self.runner_of[job] = runner

    def take(self, job: int) -> None:
        """Take a job off its runner."""
        runner = self.runner_of[job]
        for group in self.instance.groups[job]:
            self._present[runner][group] -= 1
        self.loads[runner] -= self.added(job, runner)
        self.held[runner].remove(job)
        self.runner_of[job] = -1

    def exchanged(self, runner: int, out: int | None, into: int | None) -> int:
        """Return a runner's load if it gave one job and got another, without doing it; None is no job."""
        instance, present, load = self.instance, self._present[runner], self.loads[runner]
        given = instance.groups[out] if out is not None else ()
        got = instance.groups[into] if into is not None else ()
        if out is not None:
            load -= instance.own[out] + sum(instance.setup[g] for g in given if g not in got and present[g] == 1)
        if into is not None:
            load += instance.own[into] + sum(instance.setup[g] for g in got if g not in given and not present[g])
        return load
