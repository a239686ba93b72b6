"""The `matrix` command: list the cells, explain one, report which are proven."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from matrix import ledger
from matrix.cell import CellIdError, parse_cell_id
from matrix.checkpoint import CheckpointError
from matrix.coverage import cover
from matrix.est_time import read_est_times
from matrix.explain import explain
from matrix.generate import cells
from matrix.model_shape import ConfigError
from matrix.report import as_json, markdown, terminal
from matrix.rules import decide
from matrix.space import Space, SpaceError, load_space

DEFAULT_LEDGER = "reports/ledger"
DEFAULT_EST_TIME = "ci/est_time.json"

DESCRIPTION = """\
Which combinations of model, parallel layout and weight-cache mode there are, and which are proven.

A cell is one combination; its id reads MODEL/LAYOUT/MODE/TRANSPORT, as in qwen3-moe-tiny/tp2/client/shm. Running the
suite (`pytest conformance`) appends each cell's result to a ledger; `matrix report` makes the table of it.
"""
EXAMPLES = """\
examples:
  matrix list --tier smoke                       the cells that each change must pass
  matrix explain qwen3-moe-tiny/tp2/client/shm   one cell: its rules, command lines, tests
  matrix report                                  the coverage table, from reports/ledger/*.jsonl
  matrix report --format markdown --output reports/COVERAGE.md
"""
LIST_EXAMPLES = """\
examples:
  matrix list                                    every legal cell
  matrix list --tier smoke --format json         for a program
"""
REPORT_EXAMPLES = """\
A cell never run says `not run`. What could not be read (a torn line, a run that was cut short) is listed below the table;
a ledger that cannot be read at all is an error, and no table is shown.

examples:
  matrix report --tier smoke
  matrix report --ledger gpu.jsonl --ledger reports/ledger/local.jsonl
  matrix report --format json | jq '.rows[] | select(.status != "passed") | .cell'
"""
EXPLAIN_EXAMPLES = """\
Exit status 1 where the cell is refused by a rule.

examples:
  matrix explain qwen3-tiny/tp2/daemon/shm
  matrix explain qwen3-tiny/tp2/daemon/shm --checkpoint "$(python -m conformance.checkpoints qwen3-tiny | cut -f 2)"
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, 1 for a refused cell, 2 for an error (one line on standard error)."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(load_space(arguments.space), arguments))
    except (SpaceError, ledger.LedgerError, CellIdError, CheckpointError, ConfigError, ValueError) as error:
        return _fail(str(error))
    except KeyError as error:
        return _fail(str(error.args[0]))
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough; say nothing at the interpreter's end either
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")


def _parser() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("matrix", description=DESCRIPTION, epilog=EXAMPLES, formatter_class=raw)
    parser.add_argument("--space", type=Path, metavar="FILE", help="another space than the one of this package (TOML)")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    listing = commands.add_parser("list", help="the legal cells", epilog=LIST_EXAMPLES, formatter_class=raw)
    listing.add_argument("--tier", help="only the cells of this tier (default: of all)")
    listing.add_argument("--format", choices=("table", "json"), default="table")
    listing.set_defaults(run=_list)

    report = commands.add_parser("report", help="the coverage table", epilog=REPORT_EXAMPLES, formatter_class=raw)
    report.add_argument(
        "--ledger",
        type=Path,
        action="append",
        metavar="PATH",
        help=f"a ledger, or a directory of *.jsonl; may be repeated (default: {DEFAULT_LEDGER})",
    )
    report.add_argument("--format", choices=("terminal", "markdown", "json"), default="terminal")
    report.add_argument("--tier", help="only the cells of this tier (default: of all)")
    report.add_argument(
        "--est-time",
        type=Path,
        default=Path(DEFAULT_EST_TIME),
        metavar="FILE",
        help=f"estimates to show beside measurements (default: {DEFAULT_EST_TIME})",
    )
    report.add_argument("--output", type=Path, metavar="FILE", help="write there (default: standard output)")
    report.set_defaults(run=_report)

    explaining = commands.add_parser("explain", help="one cell in words", epilog=EXPLAIN_EXAMPLES, formatter_class=raw)
    explaining.add_argument("cell", metavar="CELL", help="a cell's id, as `matrix list` shows them")
    explaining.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="show what each rank holds of this checkpoint"
    )
    explaining.set_defaults(run=_explain)
    return parser


def _list(space: Space, arguments: argparse.Namespace) -> int:
    chosen = cells(space, arguments.tier)
    members = {name: set(cells(space, name)) for name in space.tiers}
    tiers = {cell: [name for name in space.tiers if cell in members[name]] for cell in chosen}
    if arguments.format == "json":
        rows = [
            {
                "id": cell.id,
                "class_name": cell.class_name,
                "model": cell.model,
                "layout": cell.layout.short,
                "mode": cell.mode,
                "transport": cell.transport,
                "world_size": cell.layout.world_size,
                "tiers": tiers[cell],
            }
            for cell in chosen
        ]
        print(msgspec.json.format(msgspec.json.encode(rows), indent=2).decode())
        return 0
    table = [[cell.id, cell.class_name, str(cell.layout.world_size), " ".join(tiers[cell])] for cell in chosen]
    print(terminal.render_table(("cell", "class", "ranks", "tiers"), table))
    print(f"{len(chosen)} cells")
    return 0


def _report(space: Space, arguments: argparse.Namespace) -> int:
    contents = ledger.read(_ledger_files(arguments.ledger))
    known = [cell.id for cell in cells(space)]
    est_times = read_est_times(arguments.est_time)
    coverage = cover(cells(space, arguments.tier), contents, ledger.now(), known, est_times)
    if arguments.format == "json":
        text = as_json.render(coverage)
    elif arguments.format == "markdown":
        text = markdown.render(coverage)
    else:
        text = terminal.render(coverage, colour=arguments.output is None and terminal.wants_colour())
    if arguments.output is None:
        print(text, end="")
    else:
        arguments.output.write_text(text, "utf-8")
    return 0


def _explain(space: Space, arguments: argparse.Namespace) -> int:
    cell = parse_cell_id(arguments.cell)
    print(explain(space, cell, arguments.checkpoint), end="")
    return 1 if decide(space.model(cell.model).shape, cell) else 0


def _ledger_files(given: list[Path] | None) -> list[Path]:
    """Return the files to read. A path that was asked for must be there; the default directory need not."""
    files: list[Path] = []
    for path in given or [Path(DEFAULT_LEDGER)]:
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if given and not found:
            raise ledger.LedgerError(f"{path}: holds no *.jsonl")
        files += found if given or path.is_dir() else []
    return files


def _fail(text: str) -> int:
    print(f"matrix: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
