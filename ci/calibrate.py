"""The command that calibrates `est_time`: `python -m ci.calibrate --help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from pathlib import Path

from ci.calibration import Calibration, NothingUsable, calibrate
from ci.est_time_file import DEFAULT_PATH, EstTimeFileError, read_est_times, write_est_times, write_whole
from ci.est_time_report import render, summary
from ci.explain import explain, wants_plain
from ci.other_suites import Unit
from ci.parameter_model import Parameters, parameters_of
from ci.registrations import RegistrationError, registrations_below
from ci.sources import Gathered, SourceError, gather
from ci.suite_files import backend_of, calibrate_files, rewrite, select
from matrix.generate import cells
from matrix.space import SpaceError, load_space

DEFAULT_SOURCE = "reports/ledger"
DEFAULT_REPORT = Path("reports/est_time.md")
#: Exit statuses beside 0.
OFF, BAD_INPUT, NOTHING_USABLE = 1, 2, 3

DESCRIPTION = """\
How long each test class takes, from runs that were measured: est_time to pack shards by, time-out to end a hang.

Readings come from ledgers, JUnit XML, pytest-reportlog or pytest-split files; what a file is, its content says. For each
machine kind and class the last 15 passing readings count, at least 3; reruns, strays, cold caches and busy machines are
kept apart, and a lasting change of level is followed. Numbers move only past a threshold (ci/policy.py has them all, with
reasons), so that noise makes no diffs. The result depends on the readings and --as-of alone.

Without --write nothing is written: the table shows what would be.
"""
EPILOG = """\
exit status: 0; 1 --check found estimates off, stale or missing; 2 bad input: a file that can't be read, is of a newer
format, or a wrong option; 3 no usable reading. In all but 0 no file is changed.

examples:
  python -m ci.calibrate                                     what reports/ledger/ says, beside ci/est_time.json
  python -m ci.calibrate --write                             update ci/est_time.json and reports/est_time.md
  python -m ci.calibrate gathered/ --as-of 2026-12-01 --check
  python -m ci.calibrate --explain TestQwen3Tiny_TP2_Client  its readings, which count, and why others don't
  zcat old.jsonl.gz | python -m ci.calibrate - --format markdown
  python -m ci.calibrate results/*.xml --machine nvidia-h200 --registrations test/registered --write
      SGLang's files: rewrites est_time in the register_cuda_ci() calls of test/registered, and nothing else
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line on standard error, notes too."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.registrations and not arguments.machine:
        parser.error("--registrations needs --machine KIND: its readings are of one kind of machine")
    if (arguments.backend or arguments.suite) and not arguments.registrations:
        parser.error("--backend and --suite choose among the calls that --registrations DIR reads")
    if arguments.as_of is None:
        arguments.as_of = datetime.now(UTC)
    unit: Unit = "file" if arguments.registrations else arguments.unit
    try:
        gathered = gather(arguments.sources or [DEFAULT_SOURCE], arguments.as_of, arguments.machine, unit)
        for problem in gathered.problems:
            _note(problem)
        run = _calibrate_files if arguments.registrations else _calibrate_classes
        return run(gathered, arguments)
    except NothingUsable as error:
        return _fail(str(error), NOTHING_USABLE)
    except (SourceError, EstTimeFileError, RegistrationError, SpaceError) as error:
        return _fail(str(error), BAD_INPUT)
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough; say nothing at the interpreter's end either
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", BAD_INPUT)


def moment(text: str) -> datetime:
    """Return the time that `--as-of` names: an ISO 8601 time (UTC where it has no zone), or a date, to its end in UTC."""
    try:
        if len(text) == len("2026-12-01"):
            return datetime.combine(date.fromisoformat(text), time.max, UTC)
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: a date (2026-12-01) or an ISO 8601 time expected") from error
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _calibrate_classes(gathered: Gathered, arguments: argparse.Namespace) -> int:
    previous = read_est_times(arguments.est_time, missing_ok=True)
    found = calibrate(gathered.readings, arguments.as_of, previous, _suite_parameters(), machine=arguments.machine)
    if arguments.explain:
        return _explain(found, arguments.explain)
    print(render(found, arguments.format), end="")
    if arguments.write:
        changed = write_est_times(arguments.est_time, found.times)
        # The table has today's statistics; with the same estimates it would be a diff of noise.
        if changed or not arguments.report.exists():
            arguments.report.parent.mkdir(parents=True, exist_ok=True)
            write_whole(arguments.report, render(found, "markdown").encode())
        _note(f"{arguments.est_time}: {'written' if changed else 'unchanged'} ({summary(found)})")
    return _verdict(found, arguments.check)


def _calibrate_files(gathered: Gathered, arguments: argparse.Namespace) -> int:
    backend = arguments.backend or backend_of(arguments.machine)
    chosen = select(registrations_below(arguments.registrations), backend, arguments.suite)
    found = calibrate_files(chosen, gathered.readings, arguments.machine, arguments.as_of)
    if arguments.explain:
        return _explain(found.calibration, arguments.explain)
    print(render(found.calibration, arguments.format), end="")
    if arguments.write:
        for path in rewrite(found.values):
            _note(f"{path}: est_time rewritten")
    return _verdict(found.calibration, arguments.check)


def _explain(found: Calibration, name: str) -> int:
    rows = [row for row in found.rows if name == row.class_name or row.class_name.endswith(f"/{name}")]
    if not rows:
        names = sorted({row.class_name for row in found.rows})
        near = ", ".join(names[:3])
        return _fail(
            f"--explain {name}: no reading and no estimate; there are {len(names)} classes ({near}, ...)", BAD_INPUT
        )
    print(explain(rows, plain=wants_plain()), end="")
    return 0


def _verdict(found: Calibration, check: bool) -> int:
    if not check or not found.findings:
        return 0
    for line in found.findings:
        print(f"ci.calibrate: {line}", file=sys.stderr)
    print(f"ci.calibrate: {len(found.findings)} findings; `python -m ci.calibrate --write` updates", file=sys.stderr)
    return OFF


def _suite_parameters() -> dict[str, Parameters]:
    """Return the parameters of every class of this suite."""
    space = load_space()
    return {cell.class_name: parameters_of(cell, space.model(cell.model)) for cell in cells(space)}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ci.calibrate",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "sources",
        nargs="*",
        metavar="FILE|DIR|-",
        help=f"where readings are; a directory is searched at any depth, - is standard input (default: {DEFAULT_SOURCE})",
    )
    parser.add_argument(
        "--as-of",
        type=moment,
        default=None,
        metavar="DATE",
        help="calibrate as on that day, or at that time; later readings are left out (default: now)",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="exit 1 where estimates are off, stale or missing")
    what.add_argument("--write", action="store_true", help="update the estimates, and the table where they changed")
    what.add_argument("--explain", metavar="CLASS", help="chart the readings of a class, with what is used and why")
    parser.add_argument(
        "--machine", metavar="KIND", help="only this kind (default: all); the kind of files that don't name one"
    )
    parser.add_argument("--format", choices=("terminal", "markdown", "json"), default="terminal", help="of the table")
    parser.add_argument(
        "--est-time", type=Path, default=DEFAULT_PATH, metavar="FILE", help="the estimates (default: ci/est_time.json)"
    )
    parser.add_argument(
        "--report",
        type=Path,
        default=DEFAULT_REPORT,
        metavar="FILE",
        help=f"where --write puts the Markdown table (default: {DEFAULT_REPORT})",
    )
    others = parser.add_argument_group("suites of others")
    others.add_argument(
        "--unit", choices=("class", "file"), default="class", help="what is estimated from JUnit and the like"
    )
    others.add_argument(
        "--registrations", type=Path, metavar="DIR", help="calibrate the register_*_ci(est_time=...) calls below DIR"
    )
    others.add_argument("--backend", help="of which calls: cuda, amd, cpu, ... (default: by the machine kind)")
    others.add_argument("--suite", help="only calls of this suite; STAGE-test-RUNNER where those are given")
    return parser


def _note(text: str) -> None:
    print(f"ci.calibrate: {text}", file=sys.stderr)


def _fail(text: str, status: int) -> int:
    _note(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
