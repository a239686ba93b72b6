"""How long a split takes, and how far it is from the lower bound: `python -m ci.bench.split`.

Sizes and kinds are those of `ci.packing_examples`. `near`: a split again from the first one after each class's time
changed by about 3 %. `shared`: each class saves 15 s where another of its ten or so is on the same runner; the bound
counts each group's saving as if it never had to be cut, so that much of that gap is the bound's.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from tabulate import tabulate

from ci.packing import Job, Packing, pack
from ci.packing_examples import Example, examples
from ci.rivals import greedy_longest_first


def measure(example: Example, repeats: int) -> list[tuple[object, ...]]:
    """Return a row for each way of splitting an example: size, way, median seconds, gap in percent, classes moved."""
    draw = random.Random(7)
    first = pack(example.jobs, example.runners)
    previous = {job.name: number for number, jobs in enumerate(first.shards) for job in jobs}
    changed = [Job(job.name, job.seconds * draw.lognormvariate(0, 0.03)) for job in example.jobs]
    groups = [f"group{draw.randrange(max(2, len(example.jobs) // 10))}" for _ in example.jobs]
    sharing = [Job(job.name, job.seconds + 15, (group,)) for job, group in zip(example.jobs, groups, strict=True)]
    savings = dict.fromkeys(groups, 15.0)
    greedy = greedy_longest_first(example.seconds, example.runners)
    longest = max(
        sum(s for s, place in zip(example.seconds, greedy, strict=True) if place == r) for r in range(example.runners)
    )
    ways: dict[str, Callable[[], Packing]] = {
        "anew": lambda: pack(example.jobs, example.runners),
        "near": lambda: pack(changed, example.runners, previous=previous),
        "shared": lambda: pack(sharing, example.runners, savings),
    }
    rows: list[tuple[object, ...]] = []
    for name, split in ways.items():
        seconds, packing = _timed(split, repeats)
        rows.append(
            (
                len(example.jobs),
                example.runners,
                example.kind,
                name,
                f"{seconds:.3f}",
                f"{100 * packing.gap:.2f}",
                packing.moved if name == "near" else "",
                f"{100 * (longest / first.lower_bound - 1):.2f}" if name == "anew" else "",
            )
        )
    return rows


def _timed(split: Callable[[], Packing], repeats: int) -> tuple[float, Packing]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        packing = split()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds), packing


def main(argv: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m ci.bench.split", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="runs whose median is shown (default: 3)")
    repeats = max(1, parser.parse_args(argv).repeats)
    rows = [row for example in examples() for row in measure(example, repeats)]
    headers = ["classes", "runners", "times", "split", "seconds (median)", "gap %", "moved", "longest-first gap %"]
    print(tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    main()
