"""How units are spread over pytest-xdist's workers: each class on one worker, the longest first.

A class starts its daemon once, so that its tests must stay together. xdist's `--dist loadgroup` would do it, but loses its
groups with pytest 9.2 without a word; this scheduler reads nothing but the node ids that workers collected, so that no
version of pytest can break it silently, and `selftest/test_scheduler.py` counts the starts.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict
from collections.abc import Mapping

import pytest
from xdist.remote import Producer
from xdist.scheduler.loadscope import LoadScopeScheduling

WorkUnit = dict[str, bool]


def unit_of(nodeid: str) -> str:
    """Return the unit that a test belongs to: its outermost class, or its module where it has none."""
    module, *inner = nodeid.split("[", 1)[0].split("::")
    return f"{module}::{inner[0]}" if len(inner) > 1 else module


def weight(unit: str, tests: int, seconds: Mapping[str, float]) -> tuple[bool, float, int]:
    """Return what units are ordered by: classes, which start processes, before modules of functions; then their size.

    A class's size is its estimate, `seconds` by class name, then its number of tests. One without an estimate counts as
    much as the median of those that have one.
    """
    usual = statistics.median(seconds.values()) if seconds else 0.0
    return "::" in unit, seconds.get(unit.rpartition("::")[2], usual), tests


class LongestFirst(OrderedDict[str, WorkUnit]):
    """A queue of units that hands out the heaviest first; equal ones in the order in which they came."""

    def __init__(self, units: Mapping[str, WorkUnit] | None = None, seconds: Mapping[str, float] | None = None) -> None:
        super().__init__(units or {})
        self._seconds = seconds or {}

    def popitem(self, last: bool = False) -> tuple[str, WorkUnit]:
        unit = max(self, key=lambda name: weight(name, len(self[name]), self._seconds))
        return unit, self.pop(unit)


class UnitScheduling(LoadScopeScheduling):
    """Gives whole units to workers. `seconds` are the estimates by class name."""

    def __init__(
        self, config: pytest.Config, log: Producer | None = None, seconds: Mapping[str, float] | None = None
    ) -> None:
        super().__init__(config, log)
        self.workqueue = LongestFirst(seconds=seconds)

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)
