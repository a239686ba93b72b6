"""What a read of the published configuration costs in a hot loop, beside a plain attribute: `python -m ci.bench.config_read`."""

from __future__ import annotations

import statistics
import timeit

from tabulate import tabulate

from reference.context import Ranks, get_exec, get_parallel, override_server_args
from reference.parallel import initialize_groups

ROUNDS = 15
READS = 200_000


class Plain:
    """An object with an attribute, for comparison."""

    def __init__(self) -> None:
        self.size = 2


def measure() -> list[tuple[str, float, float]]:
    """Return name, median nanoseconds a read, and the ratio to a plain attribute; each way in turn, round by round."""
    plain = Plain()
    ways = {
        "plain.size": lambda: plain.size,
        "get_parallel().ep_size (published leaf)": lambda: get_parallel().ep_size,
        "get_parallel().tp_size (live group)": lambda: get_parallel().tp_size,
        "get_exec().page_size": lambda: get_exec().page_size,
        "get_exec().moe.enable_eplb": lambda: get_exec().moe.enable_eplb,
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, read in ways.items():
            seconds[name].append(timeit.timeit(read, number=READS))
    base = statistics.median(seconds["plain.size"])
    return [(name, statistics.median(s) / READS * 1e9, statistics.median(s) / base) for name, s in seconds.items()]


def main() -> None:
    """Print the table."""
    with override_server_args(tp_size=2, ranks=Ranks()):
        initialize_groups()
        rows = measure()
    print(tabulate(rows, headers=["read", "ns (median)", "x plain"], floatfmt=".1f", tablefmt="github"))


if __name__ == "__main__":
    main()
