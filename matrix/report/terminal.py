"""The coverage table for a terminal, or a pipe."""

from __future__ import annotations

import io
import os
import sys

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from matrix.coverage import Coverage
from matrix.report.columns import columns, reasons, totals, values

STYLES = {"passed": "green", "failed": "bold red", "error": "bold red", "skipped": "yellow", "not run": "dim"}
RIGHT = ("seconds", "age")


def render(coverage: Coverage, *, colour: bool = False) -> str:
    """Return the table as text, as wide as its content, so that no name is cut; ANSI colours on request."""
    names = columns(coverage)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ignore", justify="right" if name in RIGHT else "left")
    for row in coverage.rows:
        cells = (Text(value) for value in values(row, names))
        table.add_row(*cells, style=STYLES[row.status])
    console = Console(
        file=io.StringIO(),
        width=10_000,
        force_terminal=colour,
        no_color=not colour,
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(table)
        for line in totals(coverage):
            console.print(Text(line, style="bold"), soft_wrap=True)
        _section(console, "Reasons", reasons(coverage), "")
        _section(console, "Not to be overlooked", list(coverage.problems), "yellow")
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


def wants_colour() -> bool:
    """Whether standard output is a terminal that shows colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _section(console: Console, title: str, lines: list[str], style: str) -> None:
    if lines:
        console.print(Text(f"\n{title}:", style="bold"))
        for line in lines:
            console.print(Text(f"  {line}", style=style), soft_wrap=True)
