"""The command that replays histories and scores estimates and splits: `python -m ci.simulate --help`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tabulate import tabulate

from ci.est_time_file import write_whole
from ci.history import REGIMES, History, recorded, synthetic
from ci.packing import pack
from ci.packing_examples import examples
from ci.readings import machines
from ci.replay import OVER, Estimates, calibrated, known_levels, score_estimates, score_splits, simple
from ci.rivals import RIVALS
from ci.sources import SourceError, gather

COMMAND = "python -m ci.simulate"
DESCRIPTION = f"""\
Replay histories of a test suite, and score the estimates of ci.calibrate and the splits of ci.shard on them.

Before each day's runs, estimates are made from what was known by then, and the runs are split over runners by them.
Without --ledger the histories are synthetic, one for each regime ({", ".join(regime.name for regime in REGIMES)}); the
same seed gives the same tables, to the byte. With --ledger the recorded runs are replayed, one after the other.
"""
EPILOG = f"""\
examples:
  {COMMAND} --output reports/shard_simulation.md       every regime, and the splits of fixed sizes; some minutes
  {COMMAND} --regime shifts --classes 40 --days 90     one history, smaller
  {COMMAND} --ledger reports/ledger/cpu.jsonl --runners 2
"""
EXPLANATION = f"""\
Estimates: `over` is the part of class-days on which a run took more than {OVER:g} times its estimate, `time-outs missed` the
part of passing runs that the time-out would have ended, `rewritten` the part of estimates that changed a day. The true level is what no
estimator can know: what is over it is noise, spikes and busy machines.

Splits: `planned` is makespan over lower bound, by the times that were split by; `ran` the same by the times that the runs
took. The optimum is nowhere below the bound, so that each figure is at least as bad as the truth. `moved` is classes a day
that changed their runner. pytest-split is given whole classes, which favours it, once with the same estimates and once
with what it stores itself, the last duration; on whole classes its `least_duration` is longest-first greedy.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0, or 2 for an error (one line on standard error)."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    try:
        text = "\n".join(_report(arguments, argv))
        if arguments.output:
            write_whole(arguments.output, text.encode())
        print(text, end="")
    except (SourceError, ValueError) as error:
        return _fail(str(error))
    except BrokenPipeError:
        sys.stderr.close()  # a reader such as `head` has seen enough
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}")
    return 0


def estimate_table(history: History, estimates: Sequence[Estimates]) -> str:
    """Return the scores of some estimates of a history as a Markdown table."""
    rows = []
    for one in estimates:
        score = score_estimates(history, one)
        rows.append(
            (score.name, score.class_days, *map(_percent, (score.error, score.over, score.missed, score.rewritten)))
        )
    headers = ("estimates", "class-days", "median error", "over", "time-outs missed", "rewritten")
    return _table(rows, headers)


def split_table(history: History, estimates: Sequence[Estimates], runners: int) -> str:
    """Return the scores of the project's splits and of rivals' as a Markdown table: all by the first estimates.

    By the further ones only pytest-split's two are scored, and this project's, for comparison.
    """
    rows = []
    for index, one in enumerate(estimates):
        for score in score_splits(history, one, runners, RIVALS if index == 0 else _PYTEST_SPLIT):
            ratios = (score.planned, score.planned_worst, score.ran, score.ran_p95)
            rows.append((score.name, score.times, *(f"{ratio:.3f}" for ratio in ratios), f"{score.moved:.1f}"))
    return _table(rows, ("split", "by", "planned", "worst day", "ran", "95th percentile", "moved"))


def example_table(seed: int) -> str:
    """Return makespan over lower bound of fixed packing problems, this project's and rivals', as a Markdown table."""
    rows = []
    for example in examples(seed):
        packing = pack(example.jobs, example.runners)
        ratios = [packing.makespan / packing.lower_bound]
        for split in RIVALS.values():
            loads = np.bincount(split(example.seconds, example.runners), weights=example.seconds)
            ratios.append(float(loads.max()) / packing.lower_bound)
        rows.append((len(example.jobs), example.runners, example.kind, *(f"{ratio:.4f}" for ratio in ratios)))
    return _table(rows, ("classes", "runners", "times", "ci.shard", *RIVALS))


_PYTEST_SPLIT = {name: split for name, split in RIVALS.items() if name.startswith("pytest-split")}


def _report(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[str]:
    shown = [one for one in argv if not one.startswith("--output")] if "--output" not in argv else list(argv)
    yield "# Simulated years: estimates and splits\n"
    yield f"Printed by `{' '.join([COMMAND, *shown])}`; seed {arguments.seed}, {arguments.runners} runners.\n"
    yield EXPLANATION
    for history, about in _histories(arguments):
        yield f"## {history.name}\n\n{about}\n"
        ours, others = calibrated(history), list(simple(history))
        last, level = others[0], known_levels(history)
        yield estimate_table(history, [ours, *others, *([level] if level else [])]) + "\n"
        yield split_table(history, [ours, last], arguments.runners) + "\n"
    if not arguments.ledger:
        yield "## Splits of fixed problems\n\nMakespan over lower bound. `skewed`: log-normal times; `even`: 90 to 110 s; `wide`: 20 to 100 s.\n"
        yield example_table(arguments.seed) + "\n"


def _histories(arguments: argparse.Namespace) -> Iterator[tuple[History, str]]:
    if arguments.ledger:
        found = gather(arguments.ledger, datetime.now(UTC), None)
        kinds = machines(found.readings)
        if not kinds:
            raise ValueError(f"{', '.join(arguments.ledger)}: no readings to replay")
        for machine in kinds:
            history = recorded(machine, (one for one in found.readings if one.machine == machine))
            yield history, f"Recorded: {len(history.steps)} runs of {len(history.classes)} classes."
        return
    size = f"{arguments.classes} classes, {arguments.days} days, {arguments.runs_a_day} runs a day"
    for regime in REGIMES:
        if not arguments.regime or regime.name in arguments.regime:
            history = synthetic(regime, arguments.classes, arguments.days, arguments.runs_a_day, arguments.seed)
            yield history, f"{size}; {regime.description}."


def _table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def _percent(part: float) -> str:
    return "-" if math.isnan(part) else f"{100 * part:.2f} %"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        COMMAND, description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--regime", action="append", choices=[one.name for one in REGIMES], help="only this one; may be repeated"
    )
    parser.add_argument(
        "--ledger", action="append", metavar="PATH", help="replay the runs of a ledger, or of a directory of them"
    )
    parser.add_argument(
        "--classes", type=_count, default=100, metavar="N", help="of the synthetic suite (default: 100)"
    )
    parser.add_argument("--days", type=_count, default=365, metavar="N", help="of each history (default: 365)")
    parser.add_argument("--runs-a-day", type=_count, default=2, metavar="N", help="of the whole suite (default: 2)")
    parser.add_argument("--runners", type=_count, default=8, metavar="N", help="to split over (default: 8)")
    parser.add_argument("--seed", type=_count, default=1, metavar="N", help="of all draws (default: 1)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also write the report there")
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a whole number from 1 on")
    return int(text)


def _fail(text: str) -> int:
    print(f"ci.simulate: {text}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
