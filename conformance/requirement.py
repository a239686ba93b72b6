"""Requirements: what each test checks, under an id that never changes its meaning.

An id (`WC-SHARE-001`: area, number) is permanent. A requirement that is dropped leaves its number unused.
`conformance/ids.txt` lists them all, so that a rename is a visible change.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

Level = Literal["must", "should", "may"]
Test = TypeVar("Test", bound=Callable[..., Any])

_ID = re.compile(r"^WC-[A-Z]+-\d{3}$")
_ATTRIBUTE = "requirement"


@dataclass(frozen=True)
class Requirement:
    """What is done, what is expected, and how binding it is."""

    id: str
    level: Level
    does: str
    expects: str


def requirement(id: str, *, level: Level, does: str, expects: str) -> Callable[[Test], Test]:
    """Name the requirement that a test checks. Raises ValueError for an id of another form than `WC-AREA-001`."""
    if not _ID.match(id):
        raise ValueError(f"requirement id {id!r} is not of the form WC-AREA-001")

    def attach(test: Test) -> Test:
        setattr(test, _ATTRIBUTE, Requirement(id, level, does, expects))
        return test

    return attach


def requirement_of(test: object) -> Requirement | None:
    """Return the requirement that a test function checks, or None."""
    found = getattr(test, _ATTRIBUTE, None)
    return found if isinstance(found, Requirement) else None


def requirements_of(case: type) -> dict[str, Requirement]:
    """Return the requirements that a test class checks, by id, its inherited ones included."""
    tests = (getattr(case, name) for name in dir(case) if name.startswith("test_"))
    return {found.id: found for found in map(requirement_of, tests) if found is not None}
