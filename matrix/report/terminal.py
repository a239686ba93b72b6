"""The coverage table for a terminal, or a pipe."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from matrix.coverage import Coverage
from matrix.report.columns import columns, reasons, totals, values

STYLES = {"passed": "green", "failed": "bold red", "error": "bold red", "skipped": "yellow", "not run": "dim"}
RIGHT = ("seconds", "age", "ranks", "bytes")


def render(coverage: Coverage, *, colour: bool = False) -> str:
    """Return the coverage as text, with ANSI colours on request."""
    names = columns(coverage)
    rows = [(values(row, names), STYLES[row.status]) for row in coverage.rows]
    console = _console(colour)
    with console.capture() as captured:
        console.print(_table(names, rows), "")
        for line in totals(coverage):
            console.print(Text(line, style="bold"), soft_wrap=True)
        _section(console, "Reasons", reasons(coverage), "")
        _section(console, "Not to be overlooked", list(coverage.problems), "yellow")
    return _stripped(captured.get())


def render_table(names: Sequence[str], rows: Sequence[Sequence[str]], *, colour: bool = False) -> str:
    """Return any table as text, in the look of the coverage table."""
    console = _console(colour)
    with console.capture() as captured:
        console.print(_table(names, [(row, "") for row in rows]))
    return _stripped(captured.get())


def wants_colour() -> bool:
    """Whether standard output is a terminal that shows colours, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _section(console: Console, title: str, lines: list[str], style: str) -> None:
    if lines:
        console.print(Text(f"\n{title}:", style="bold"))
        for line in lines:
            console.print(Text(f"  {line}", style=style), soft_wrap=True)


def _console(colour: bool) -> Console:
    """Return a console without a width: a table is as wide as its content, and no name is ever cut."""
    return Console(file=io.StringIO(), width=10_000, force_terminal=colour, no_color=not colour, highlight=False)


def _table(names: Sequence[str], rows: Sequence[tuple[Sequence[str], str]]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, no_wrap=True, overflow="ignore", justify="right" if name in RIGHT else "left")
    for texts, style in rows:
        table.add_row(*map(Text, texts), style=style)
    return table


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n") + "\n"
