"""The coverage table as JSON, for programs."""

from __future__ import annotations

import msgspec

from matrix.coverage import Coverage


def render(coverage: Coverage) -> str:
    """Return `{"rows": [...], "totals": {...}, "problems": [...]}`; a row's fields are those of `matrix.coverage.Row`."""
    return msgspec.json.format(msgspec.json.encode(coverage), indent=2).decode() + "\n"
