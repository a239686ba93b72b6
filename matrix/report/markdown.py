"""The coverage table in GitHub's Markdown."""

from __future__ import annotations

from tabulate import tabulate

from matrix.coverage import Coverage
from matrix.report.columns import columns, reasons, totals, values


def render(coverage: Coverage) -> str:
    """Return the table, the totals, and what has to be explained. A bar in a name or a reason is escaped."""
    names = columns(coverage)
    align = ["right" if name in ("seconds", "age") else "left" for name in names]
    rows = [[_escape(value) for value in values(row, names)] for row in coverage.rows]
    table = tabulate(rows, headers=names, tablefmt="github", disable_numparse=True, colalign=align if rows else None)
    parts = [table, "\n".join(f"{line}  " for line in totals(coverage))]
    for title, lines in (("Reasons", reasons(coverage)), ("Not to be overlooked", coverage.problems)):
        if lines:
            parts.append(f"**{title}**\n\n" + "\n".join(f"- {_escape(line)}" for line in lines))
    return "\n\n".join(parts) + "\n"


def _escape(text: str) -> str:
    return text.replace("\n", " ").replace("|", "\\|")
