"""The command that splits classes over runners: `python -m ci.shard --help`."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ci.class_times import ClassListError, ClassTime, group_savings, listed_classes, tier_classes
from ci.est_time_file import DEFAULT_PATH, EstTimeFileError, read_est_times, write_whole
from ci.estimate import Estimate
from ci.packing import DEFAULT_SLACK, DeadlineError, PackingError, fewest_runners, pack
from ci.shard_formats import FORMATS, FormatError, as_json, read_split, summary
from ci.shard_plan import NotAPartitionError, Plan, shards_of
from matrix.machine import machine_kind
from matrix.space import SpaceError, load_space

#: Exit statuses beside 0.
NO_SPLIT, BAD_INPUT, EMPTY_SHARD = 1, 2, 3

DESCRIPTION = """\
Split test classes over identical runners, so that the last one to end ends early.

A class is never cut in two: it starts its daemon once. Its seconds are those of ci/est_time.json for the machine kind;
a class that isn't there gets a stated default. The result is checked to have each class exactly once, and is the same
for the same input, so that runners may each compute it and take their own part.
"""
EPILOG = """\
a list of classes has a line for each: name or node id, then seconds (left out: from ci/est_time.json), then what it
shares with others: tests/test_a.py::TestA 280 checkpoint:llama daemon:llama/tp2

exit status: 0; 1 no split meets the deadline; 2 bad input, one line says what; 3 the shard that was asked for has no class

examples:
  python -m ci.shard --tier smoke --runners 4                          a table of the split
  python -m ci.shard --tier full --machine nvidia-h200 --deadline 900  on as few runners as end within 15 minutes
  ids=$(python -m ci.shard --tier smoke --shard 2/4) && pytest $ids    what the second of four runners runs
  python -m ci.shard --tier full --runners 8 --format github --label self-hosted --label nvidia-h200
  python -m ci.shard --classes times.txt --runners 3 --previous split.json --save split.json
  python -m ci.shard --classes - --runners 3 --saving checkpoint=45 < times.txt
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status. Errors are one line on standard error, notes too."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.shard and (arguments.runners or arguments.deadline or arguments.format):
        parser.error(
            "--shard I/N says how many runners there are, and prints node ids: leave --runners, --deadline, --format out"
        )
    if not (arguments.shard or arguments.runners or arguments.deadline):
        parser.error("how many runners? give --runners N, --deadline SECONDS, or --shard I/N")
    try:
        return _run(arguments)
    except DeadlineError as error:
        return _fail(str(error), NO_SPLIT)
    except (PackingError, ClassListError, EstTimeFileError, FormatError, SpaceError, NotAPartitionError) as error:
        return _fail(str(error), BAD_INPUT)
    except KeyError as error:
        return _fail(str(error.args[0]), BAD_INPUT)
    except UnicodeDecodeError as error:
        return _fail(f"{arguments.classes}: not UTF-8: {error}", BAD_INPUT)
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough
        return 0
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}", BAD_INPUT)


def _run(arguments: argparse.Namespace) -> int:
    plan = _plan(arguments)
    if arguments.save:
        write_whole(arguments.save, as_json(plan).encode() + b"\n")
    if arguments.shard is None:
        chosen = arguments.format or "table"
        print(FORMATS[chosen](plan))
        if chosen != "table":
            _note(summary(plan))
        return 0
    number = arguments.shard[0]
    if number > len(plan.shards):
        return _fail(
            f"shard {number} is empty: {len(plan.classes)} classes fill {len(plan.shards)} shards", EMPTY_SHARD
        )
    print("\n".join(plan.shards[number - 1].nodeids))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    machine = arguments.machine or machine_kind()
    classes = _classes(arguments, machine)
    if not classes:
        raise ClassListError("no classes to split: the list, or what was chosen of the tier, is empty")
    _tell_defaults(classes, machine)
    savings, notes = group_savings(classes, dict(arguments.saving))
    for note in notes:
        _note(note)
    previous = _previous(arguments.previous, classes)
    runners = arguments.shard[1] if arguments.shard else arguments.runners
    jobs, overhead = [one.job for one in classes], arguments.overhead
    at_least = None
    if arguments.deadline is None:
        packing = pack(jobs, runners, savings, previous, arguments.slack)
        if runners > len(jobs):
            _note(f"{runners} runners for {len(jobs)} classes: {runners - len(jobs)} stay without one")
    else:
        if arguments.deadline <= overhead:
            raise DeadlineError(
                f"no split ends within {arguments.deadline:g} s: a runner's start alone takes {overhead:g} s"
            )
        fewest = fewest_runners(jobs, arguments.deadline - overhead, savings, previous, arguments.slack)
        packing, at_least = fewest.packing, fewest.at_least
        if runners is not None and len(packing.shards) > runners:
            raise DeadlineError(_too_few(runners, arguments.deadline, len(packing.shards), at_least))
    shards = shards_of(packing, classes, overhead)
    return Plan(
        machine=machine,
        labels=tuple(arguments.label or [machine]),
        shards=shards,
        lower_bound=packing.lower_bound + overhead,
        overhead=overhead,
        pytest_arguments=_pytest_arguments(arguments),
        moved=packing.moved if previous is not None else None,
        deadline=arguments.deadline,
        at_least=at_least,
    )


def _classes(arguments: argparse.Namespace, machine: str) -> list[ClassTime]:
    times = read_est_times(arguments.est_time, missing_ok=arguments.est_time == DEFAULT_PATH)
    estimates: dict[str, Estimate] = times.get(machine, {})
    if arguments.classes is None:
        return tier_classes(
            load_space(), arguments.tier, arguments.ranks, arguments.only, estimates, arguments.default_seconds
        )
    if arguments.only or arguments.ranks:
        raise ClassListError("--class and --ranks choose among the classes of a tier; with --classes, edit the list")
    if str(arguments.classes) == "-":
        return listed_classes(sys.stdin, "standard input", estimates, arguments.default_seconds)
    lines = arguments.classes.read_text("utf-8").splitlines()
    return listed_classes(lines, str(arguments.classes), estimates, arguments.default_seconds)


def _tell_defaults(classes: Sequence[ClassTime], machine: str) -> None:
    guessed = [one for one in classes if one.source == "default"]
    if guessed:
        some = ", ".join(one.name for one in guessed[:3]) + (", ..." if len(guessed) > 3 else "")
        _note(
            f"{len(guessed)} of {len(classes)} classes have no estimate on {machine} "
            f"and count {guessed[0].seconds:g} s each: {some}"
        )


def _previous(path: Path | None, classes: Sequence[ClassTime]) -> dict[str, int] | None:
    """Return the split there was. A file that isn't there yet is the first run of a job, and no error."""
    if path is None:
        return None
    if not path.exists():
        _note(f"{path}: no such file; there is no previous split to stay near to")
        return None
    previous = read_split(path)
    gone = previous.keys() - {one.name for one in classes}
    if gone:
        _note(f"{path}: {len(gone)} of its classes are not split any more: {', '.join(sorted(gone)[:3])}")
    return previous


def _pytest_arguments(arguments: argparse.Namespace) -> tuple[str, ...]:
    tier = ("--tier", arguments.tier) if arguments.tier and arguments.classes is None else ()
    return (*tier, *shlex.split(arguments.pytest_args))


def _too_few(runners: int, deadline: float, needed: int, at_least: int) -> str:
    proven = f"at least {at_least}" if at_least > runners else "by the best split that was found"
    return (
        f"no split ends within {deadline:g} s on {runners} runners: it needs {needed} ({proven}); raise one of the two"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m ci.shard",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    what = parser.add_argument_group("what to split")
    source = what.add_mutually_exclusive_group(required=True)
    source.add_argument("--tier", help="the classes of a tier of matrix/space.toml")
    source.add_argument("--classes", type=Path, metavar="FILE|-", help="the classes of a list, of any suite")
    what.add_argument("--ranks", type=_positive, action="append", default=[], metavar="N", help="only cells of N ranks")
    what.add_argument(
        "--class", dest="only", action="append", default=[], metavar="NAME", help="only this class of the tier"
    )
    how = parser.add_argument_group("over which runners")
    how.add_argument("--runners", type=_positive, metavar="N", help="how many there are")
    how.add_argument(
        "--deadline", type=_seconds, metavar="SECONDS", help="use as few as end within this; with --runners, of those"
    )
    how.add_argument(
        "--shard", type=_shard, metavar="I/N", help="split over N, and print the node ids of the I-th, one a line"
    )
    how.add_argument(
        "--machine", metavar="KIND", help="whose estimates to use, as in the ledger (default: this machine's kind)"
    )
    how.add_argument(
        "--overhead",
        type=_seconds_or_0,
        default=0.0,
        metavar="SECONDS",
        help="what a runner spends before its first class",
    )
    times = parser.add_argument_group("by which times")
    times.add_argument(
        "--est-time", type=Path, default=DEFAULT_PATH, metavar="FILE", help="the estimates (default: ci/est_time.json)"
    )
    times.add_argument(
        "--default-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="of a class without any (default: the others' median)",
    )
    times.add_argument(
        "--saving",
        type=_saving,
        action="append",
        default=[],
        metavar="GROUP=SECONDS",
        help="what each further class of a group saves on one runner; GROUP is a group or a kind: checkpoint, daemon",
    )
    stay = parser.add_argument_group("staying near the split there was")
    stay.add_argument(
        "--previous", type=Path, metavar="FILE", help="a split kept by --save: move few classes away from it"
    )
    stay.add_argument("--save", type=Path, metavar="FILE", help="keep this split, as JSON")
    stay.add_argument(
        "--slack",
        type=float,
        default=DEFAULT_SLACK,
        help=f"how much longer it may be for that (default: {DEFAULT_SLACK})",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--format", choices=tuple(FORMATS), help="default: table")
    output.add_argument(
        "--label", action="append", metavar="LABEL", help="of the runners; may be repeated (default: the machine kind)"
    )
    output.add_argument(
        "--pytest-args", default="", metavar="TEXT", help="more arguments of pytest, in commands that are emitted"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def _seconds(text: str) -> float:
    seconds = _seconds_or_0(text)
    if seconds == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: seconds above 0")
    return seconds


def _seconds_or_0(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise argparse.ArgumentTypeError(f"{text!r}: a number of seconds, 0 or more")
    return seconds


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not slash or _positive(number) > _positive(count):
        raise argparse.ArgumentTypeError(f"{text!r}: I/N, with I from 1 to N: 2/4")
    return int(number), int(count)


def _saving(text: str) -> tuple[str, float]:
    group, equals, seconds = text.rpartition("=")
    if not equals or not group:
        raise argparse.ArgumentTypeError(f"{text!r}: GROUP=SECONDS: checkpoint=45")
    return group, _seconds_or_0(seconds)


def _note(text: str) -> None:
    print(f"ci.shard: {text}", file=sys.stderr)


def _fail(text: str, status: int) -> int:
    _note(text)
    return status


if __name__ == "__main__":
    sys.exit(main())
