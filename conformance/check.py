"""Comparisons whose failure says which cell, which requirement, what was expected, what came, and how to see it again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest

from conformance.requirement import Requirement

_LONGEST = 800
_ENTRIES = 5


class Check:
    """Checks of one test. `alone` is the command that runs this test by itself."""

    def __init__(self, cell: str, requirement: Requirement | None, alone: str, log: str) -> None:
        self.cell = cell
        self.requirement = requirement
        self.alone = alone
        self.log = log

    def equal(self, what: str, expected: Any, got: Any) -> None:
        """Fail unless both are equal. Of mappings, only the entries that differ are shown."""
        if expected == got:
            return
        if isinstance(expected, Mapping) and isinstance(got, Mapping):
            names = sorted(str(name) for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
            what = f"{what}: {len(names)} of {len(expected.keys() | got.keys())} differ"
            expected, got = (
                "\n".join(f"{name}: {side.get(name, 'absent')}" for name in names[:_ENTRIES])
                for side in (expected, got)
            )
        self.fail(what, expected, got)

    def empty(self, what: str, got: Collection[Any]) -> None:
        """Fail unless there is nothing."""
        if got:
            self.fail(what, "none", "\n".join(map(str, got)))

    def true(self, what: str, condition: bool, expected: Any, got: Any) -> None:
        """Fail unless the condition holds; `expected` and `got` say what it means."""
        if not condition:
            self.fail(what, expected, got)

    def fail(self, what: str, expected: Any, got: Any) -> None:
        """Fail with the whole story."""
        lines = [
            f"what         {what}",
            f"expected     {_short(expected)}",
            f"got          {_short(got)}",
            f"cell         {self.cell}",
            f"alone        {self.alone}",
            f"log          {self.log}",
        ]
        if self.requirement:
            told = f"{self.requirement.does} {self.requirement.expects}"
            lines.insert(0, f"requirement  {self.requirement.id} ({self.requirement.level}): {told}")
        pytest.fail("\n".join(lines), pytrace=False)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
    return text.replace("\n", "\n             ")
