"""Finds daemons in a registry directory (SPEC 5)."""

from __future__ import annotations

import stat
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Where one daemon can be met: `<registry>/<device>/<key with ":" as "-">/`."""

    device: str
    key: str
    path: Path

    @property
    def socket(self) -> Path:
        return self.path / "socket"


def places(registry: Path) -> list[Place]:
    """Return every place of a registry that has a socket, sorted by device, then key. An absent registry has none."""
    found = []
    for path in sorted(registry.glob("*/*/socket")):
        if stat.S_ISSOCK(path.stat().st_mode):
            place = path.parent
            found.append(Place(place.parent.name, place.name.replace("-", ":", 1), place))
    return found


def leftovers(registry: Path) -> list[str]:
    """Return what daemons that have ended left below a registry, relative to it: sockets, locks, and places of keys.

    Content digests that a target keeps there by file identity are no daemon's, and may stay.
    """
    left = []
    for path in sorted(registry.rglob("*")):
        of_a_key = any(part.startswith("wk1-") for part in path.relative_to(registry).parts)
        if of_a_key or path.name == "lock" or stat.S_ISSOCK(path.lstat().st_mode):
            left.append(str(path.relative_to(registry)))
    return left
