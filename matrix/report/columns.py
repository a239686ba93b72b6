"""The table's columns as text, the same for every format that people read."""

from __future__ import annotations

from collections.abc import Sequence

from matrix.coverage import STATUSES, Coverage, Row

COLUMNS = ("model", "layout", "mode", "transport", "status", "layout hash", "sec/est", "machine", "age")
#: How many ranks' layout hashes are shown before the rest is only counted, and how many digits of each.
RANKS_SHOWN, DIGITS_SHOWN = 2, 5
NOTHING = "-"


def columns(coverage: Coverage) -> tuple[str, ...]:
    """Return the column names; `target` is one of them where there are results of several."""
    targets = {row.target for row in coverage.rows if row.target}
    return (*COLUMNS[:-2], "target", *COLUMNS[-2:]) if len(targets) > 1 else COLUMNS


def values(row: Row, names: Sequence[str]) -> list[str]:
    """Return a row's text by column name."""
    texts = {
        "model": row.model,
        "layout": row.layout,
        "mode": row.mode,
        "transport": row.transport,
        "status": row.status,
        "layout hash": short_hashes(row.layout_hashes),
        "sec/est": seconds(row),
        "target": row.target or NOTHING,
        "machine": row.machine or NOTHING,
        "age": NOTHING if row.age_seconds is None else age(row.age_seconds),
    }
    return [texts[name] for name in names]


def seconds(row: Row) -> str:
    """Return measured seconds and, where there is one, what was estimated: `12.3/12.9`; hundreds without decimals."""
    if row.seconds is None:
        return NOTHING
    estimate = "" if row.est_time is None else f"/{row.est_time:.{0 if row.est_time >= 100 else 1}f}"
    return f"{row.seconds:.1f}{estimate}"


def short_hashes(hashes: Sequence[str]) -> str:
    """Return the first digits of each rank's layout hash: `87dca eea59`, or `521a3 4537c +2` for four ranks."""
    shown = [value.rpartition(":")[2][:DIGITS_SHOWN] for value in hashes[:RANKS_SHOWN]]
    if len(hashes) > RANKS_SHOWN:
        shown.append(f"+{len(hashes) - RANKS_SHOWN}")
    return " ".join(shown) or NOTHING


def age(seconds: float) -> str:
    """Return a duration in its largest whole unit: `12 s`, `5 min`, `3 h`, `2 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def totals(coverage: Coverage) -> list[str]:
    """Return the totals: a line for cells and, where there are any, one for requirements."""
    count = coverage.totals.statuses
    said = ", ".join(f"{count[status]} {status}" for status in STATUSES if count[status] or status == "passed")
    lines = [f"{coverage.totals.cells} cells: {said}"]
    if coverage.totals.requirements:
        said = ", ".join(f"{number} {outcome}" for outcome, number in coverage.totals.requirements.items())
        lines.append(f"requirements checked: {said}")
    targets = sorted({f"{row.target} {row.target_version}" for row in coverage.rows if row.target})
    return [*lines, f"target: {', '.join(targets)}"] if targets else lines


def reasons(coverage: Coverage) -> list[str]:
    """Return a line for each row that has something to explain: why it failed or was skipped, and where."""
    return [f"{row.cell} ({row.status}, {row.machine}): {row.reason}" for row in coverage.rows if row.reason]
