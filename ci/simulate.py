"""The command that replays histories and scores estimates and splits: `python -m ci.simulate --help`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from tabulate import tabulate

from ci.est_time_file import write_whole
from ci.history import REGIMES, History, recorded, synthetic
from ci.packing import pack
from ci.packing_examples import Example, examples
from ci.readings import machines
from ci.replay import OVER, EstimatorScore, SplitScore, calibrated, known_levels, score_estimates, score_splits, simple
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
Estimates: of class-days with an estimate, `over` is the part on which a run took more than {OVER:g} times its estimate,
`time-outs missed` the part of passing runs that the time-out would have ended, `rewritten` the part of estimates that
changed a day. The true level is what no estimator can know: what is over it is noise, spikes and busy machines.

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


def estimate_table(scores: Sequence[EstimatorScore]) -> str:
    """Return scores of estimates as a Markdown table."""
    rows = [
        (one.name, one.class_days, *map(_percent, (one.error, one.over, one.missed, one.rewritten))) for one in scores
    ]
    return _table(rows, ("estimates", "class-days", "median error", "over", "time-outs missed", "rewritten"))


def split_table(scores: Sequence[SplitScore]) -> str:
    """Return scores of splits as a Markdown table."""
    rows = [
        (
            one.name,
            one.times,
            *(f"{ratio:.3f}" for ratio in (one.planned, one.planned_worst, one.ran, one.ran_p95)),
            f"{one.moved:.1f}",
        )
        for one in scores
    ]
    return _table(rows, ("split", "by", "planned", "worst day", "ran", "95th percentile", "moved"))


def example_ratios(seed: int) -> list[tuple[Example, list[float]]]:
    """Return the fixed packing problems, each with makespan over lower bound of this project's split and each rival's."""
    found = []
    for example in examples(seed):
        packing = pack(example.jobs, example.runners)
        ratios = [packing.makespan / packing.lower_bound]
        for split in RIVALS.values():
            loads = np.bincount(split(example.seconds, example.runners), weights=example.seconds)
            ratios.append(float(loads.max()) / packing.lower_bound)
        found.append((example, ratios))
    return found


_PYTEST_SPLIT = {name: split for name, split in RIVALS.items() if name.startswith("pytest-split")}
#: What issue 6 promises: the part of class-days over their estimate, and makespan over optimum.
_PROMISED_OVER, _PROMISED_RATIO = 0.01, 1.03


def _report(arguments: argparse.Namespace, argv: Sequence[str]) -> Iterator[str]:
    yield "# Simulated years: estimates and splits\n"
    yield f"Printed by `{' '.join([COMMAND, *argv])}`; seed {arguments.seed}, {arguments.runners} runners.\n"
    yield EXPLANATION
    held: list[tuple[str, str, str, str]] = []
    for history, about in _histories(arguments):
        yield f"## {history.name}\n\n{about}\n"
        ours, (last, *others) = calibrated(history), simple(history)
        level = known_levels(history)
        estimates = [score_estimates(history, one) for one in (ours, last, *others, *([level] if level else []))]
        yield estimate_table(estimates) + "\n"
        splits = score_splits(history, ours, arguments.runners)
        splits += score_splits(history, last, arguments.runners, _PYTEST_SPLIT)
        yield split_table(splits) + "\n"
        held.append(_held(f"{history.name}: class-days over", estimates[0].over, _PROMISED_OVER, _percent))
        if splits:
            worst = splits[0].planned_worst
            held.append(_held(f"{history.name}: planned, worst day", worst, _PROMISED_RATIO, "{:.3f}".format))
    if not arguments.ledger:
        yield "## Splits of fixed problems\n"
        yield "Makespan over lower bound. `skewed`: log-normal times; `even`: 90 to 110 s; `wide`: 20 to 100 s.\n"
        found = example_ratios(arguments.seed)
        rows = [(len(one.jobs), one.runners, one.kind, *(f"{ratio:.4f}" for ratio in ratios)) for one, ratios in found]
        yield _table(rows, ("classes", "runners", "times", "ci.shard", *RIVALS)) + "\n"
        worst = max(ratios[0] for _, ratios in found)
        held.append(_held("fixed problems, worst", worst, _PROMISED_RATIO, "{:.4f}".format))
    yield "## Held against what is promised\n"
    yield _table(held, ("what", "at most", "found", "holds")) + "\n"


def _held(what: str, found: float, at_most: float, show: Callable[[float], str]) -> tuple[str, str, str, str]:
    return what, show(at_most), show(found), "yes" if found <= at_most else "no"


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
