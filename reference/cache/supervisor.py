"""The weight cache daemon as a whole: one process a rank, opened together, ended together."""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar

from reference.cache import registry
from reference.cache.daemon import DaemonRank
from reference.command_line import DAEMON, parse_args
from reference.context import Ranks, get_parallel, publish, publish_ranks
from reference.engine.ranks import (
    Exited,
    Failed,
    Loaded,
    Proceed,
    Progress,
    RankProcess,
    Ready,
    Report,
    describe_exit,
    events,
    fork_ranks,
    report_progress,
    stop,
)
from reference.errors import Refusal
from reference.parallel import check_served, initialize_groups, limit_threads

_GRACE = 10.0  # seconds between telling a rank to stop and killing it


class _Stopped(SystemExit):
    """SIGTERM came: leave by the way that cleans up."""


def main(argv: Sequence[str]) -> int:
    """Run the daemon of every local rank until SIGTERM or SIGINT. Returns the exit status."""
    try:
        publish(parse_args(argv, DAEMON), None)
        check_served()
        supervise(lambda text: print(f"ready: {text}", flush=True))
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def supervise(on_ready: Callable[[str], None]) -> None:
    """Fork the ranks of the published configuration, call `on_ready` when all serve, return when told to stop.

    Raises `Refusal` with the first rank's reason where one fails; the others are ended then.
    """
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    ranks = fork_ranks(get_parallel().world_size, _run_rank, signal.SIGTERM, (wakeup, signalled))
    # Installed after the fork: the ranks have handlers of their own.
    signal.set_wakeup_fd(signalled.fileno())
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    places: list[_Place] | None = None
    try:
        with _bar() as bar:
            places = _until_open(ranks, wakeup, bar)
        if places is None:
            return
        on_ready(f"{len(ranks)} rank{'s' if len(ranks) > 1 else ''} on {', '.join(place.device for place in places)}")
        for rank, event in events(ranks, wakeup):
            if rank is None:
                return
            # A rank that was told to stop by itself ends cleanly, and the group with it.
            if isinstance(event, Exited) and event.status == 0:
                return
            if isinstance(event, Exited):
                raise Refusal(
                    f"rank {rank.rank} of the daemon ended ({describe_exit(event.status)}); the others were stopped"
                )
    finally:
        stop(ranks, signal.SIGTERM, _GRACE)
        signal.set_wakeup_fd(-1)
        # A rank that was killed could not clear its place.
        for place in places or ():
            registry.clear_dead(place.device, place.key)


@dataclass(frozen=True)
class _Place:
    device: str
    key: str


def _until_open(ranks: list[RankProcess], wakeup: socket.socket, bar: ProgressBar) -> list[_Place] | None:
    """Follow loading until every rank serves, and return their places; None where a signal came first."""
    tasks = {rank.rank: bar.add_task(f"rank {rank.rank}: reading headers", total=None) for rank in ranks}
    loaded = 0
    places: dict[int, _Place] = {}
    for rank, event in events(ranks, wakeup):
        if rank is None:
            return None
        match event:
            case Progress(what, done, total):
                bar.update(tasks[rank.rank], description=f"rank {rank.rank}: {what}", completed=done, total=total)
                if bar.disable and done == total:
                    print(f"rank {rank.rank}: {what} done, {total:,} bytes", file=sys.stderr, flush=True)
            case Loaded():
                loaded += 1
                if loaded == len(ranks):
                    # No rank grants a lease before all have loaded, so that no engine attaches to half a group.
                    for other in ranks:
                        other.channel.send(Proceed())
            case Ready(info):
                places[rank.rank] = _Place(info["device"], info["key"])
                if len(places) == len(ranks):
                    return [places[rank.rank] for rank in ranks]
            case Failed(message):
                raise Refusal(message)
            case Exited(0):
                return None
            case Exited(status):
                raise Refusal(f"rank {rank.rank} of the daemon ended while loading ({describe_exit(status)})")
    return None


def _run_rank(rank: int, report: Report) -> None:
    told: list[int] = []
    claiming = False

    def on_term(number: int, _: object) -> None:
        told.append(number)
        if not claiming:
            _stop()

    signal.signal(signal.SIGTERM, on_term)
    publish_ranks(Ranks(world_rank=rank, local_rank=rank))
    limit_threads()
    initialize_groups()
    daemon = DaemonRank(rank, report_progress(report, "digesting"))
    try:
        try:
            claiming = True
            daemon.claim()
            claiming = False
            if told:
                _stop()
            daemon.load(report_progress(report, "loading"))
            report.send(Loaded())
            if report.receive() is None:
                return
            daemon.open()
            report.send(Ready({"device": daemon.device, "key": daemon.key}))
            # Nothing more comes; the end of the stream is the supervisor's end.
            report.receive()
        finally:
            # The supervisor's death ends the stream and sends the signal: closing must not be parted by the second.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
    finally:
        daemon.close()


def _stop() -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Stopped(0)


def _bar() -> ProgressBar:
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return ProgressBar(*columns, console=console, disable=not console.is_terminal)
