"""One forked process a rank: what each tells its parent, and how they end together.

A rank's parent learns of its death from the kernel (a pidfd), and a rank of its parent's death too (a signal).
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from reference.engine.channel import Channel
from reference.errors import Refusal

_PR_SET_PDEATHSIG = 1


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """Bytes done and in all, of what is being done."""

    what: str
    done: int
    total: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A daemon's rank holds its slab and waits for the others."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The rank does its work from now on. `info` is what `/server_info` shows of it."""

    info: dict[str, Any]


class Changed(msgspec.Struct, frozen=True, tag="changed"):
    """Fields of `Ready.info` that have new values."""

    info: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The rank can't go on; one line for the user."""

    message: str


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """The process is gone. `status` is its exit status, negative for a signal. Made by the parent."""

    status: int


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Parent to rank: the others are ready too."""


Event: TypeAlias = Progress | Loaded | Ready | Changed | Failed
Report = Channel[Proceed]


@dataclass
class RankProcess:
    """A forked rank, as its parent sees it."""

    rank: int
    pid: int
    pidfd: int
    channel: Channel[Event]
    status: int | None = None


def fork_ranks(
    count: int,
    main: Callable[[int, Report], None],
    death_signal: signal.Signals | None,
    parents_own: Sequence[socket.socket | Channel[Any]] = (),
) -> list[RankProcess]:
    """Fork `count` ranks that run `main(rank, report)` and exit: 0, or 1 behind a `Failed` event.

    `death_signal` is what a rank gets when this process dies; with None it outlives this process. `parents_own`
    are what ranks must not keep open: a port, the other end of a stream. To be called while this process has one
    thread.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[RankProcess] = []
    for rank in range(count):
        ours, theirs = socket.socketpair()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            for own in (ours, *parents_own, *(sibling.channel for sibling in ranks)):
                own.close()
            for sibling in ranks:
                os.close(sibling.pidfd)
            _run_child(rank, main, Channel(theirs, Proceed), death_signal, parent)
        theirs.close()
        ranks.append(RankProcess(rank, pid, os.pidfd_open(pid), Channel(ours, Event)))
    return ranks


def _run_child(
    rank: int, main: Callable[[int, Report], None], report: Report, death_signal: signal.Signals | None, parent: int
) -> None:
    status = 1
    try:
        # A terminal's Ctrl-C reaches every process of the group; the parent decides what becomes of the ranks.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        if death_signal is not None:
            die_with_parent(death_signal, parent)
        main(rank, report)
        status = 0
    except Refusal as error:
        report.send(Failed(str(error)))
        # Its peers would break over closed connections and hide the cause: it stays until the parent ends them all.
        report.receive()
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        traceback.print_exc()
        report.send(Failed(f"internal error in rank {rank}: {type(error).__name__}: {error}"))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def die_with_parent(death_signal: signal.Signals, parent: int) -> None:
    """Have the kernel send `death_signal` to this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), death_signal)


def events(
    ranks: list[RankProcess], wakeup: socket.socket | None = None
) -> Iterator[tuple[RankProcess | None, Event | Exited]]:
    """Yield what ranks tell, and each one's end last, until all have ended.

    Yields `(None, Exited(0))` whenever `wakeup` (a signal wake-up socket) becomes readable.
    """
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            if rank.status is None:
                selector.register(rank.pidfd, selectors.EVENT_READ, (rank, "ended"))
                selector.register(rank.channel, selectors.EVENT_READ, (rank, "told"))
        if wakeup is not None:
            selector.register(wakeup, selectors.EVENT_READ, (None, "signal"))
        while any(rank.status is None for rank in ranks):
            # What a rank told before it ended comes before its end.
            for key, _ in sorted(selector.select(), key=lambda item: item[0].data[1] == "ended"):
                rank, what = key.data
                if rank is None:
                    assert wakeup is not None
                    wakeup.recv(64)
                    yield None, Exited(0)
                    continue
                for event in rank.channel.receive_ready():
                    yield rank, event
                if rank.channel.closed and what == "told":
                    selector.unregister(rank.channel)
                if what == "ended":
                    selector.unregister(rank.pidfd)
                    rank.status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])
                    yield rank, Exited(rank.status)


def wait(ranks: list[RankProcess], grace: float) -> None:
    """Wait until every rank has ended; kill those that have not after `grace` seconds each."""
    for rank in ranks:
        if rank.status is None:
            with selectors.DefaultSelector() as selector:
                selector.register(rank.pidfd, selectors.EVENT_READ)
                if not selector.select(grace):
                    signal.pidfd_send_signal(rank.pidfd, signal.SIGKILL)
            rank.status = os.waitstatus_to_exitcode(os.waitpid(rank.pid, 0)[1])


def stop(ranks: list[RankProcess], how: signal.Signals, grace: float) -> None:
    """Signal every rank that still runs, then `wait`. A rank that waits for word of its parent reads the end of it."""
    for rank in ranks:
        rank.channel.close()
        if rank.status is None:
            signal.pidfd_send_signal(rank.pidfd, how)
    wait(ranks, grace)


def report_progress(report: Report, what: str) -> Callable[[int, int], None]:
    """Return a function that reports bytes done and in all: at most ten times a second, and the end."""
    last = 0.0

    def progress(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if done == total or now - last >= 0.1:
            last = now
            report.send(Progress(what, done, total))

    return progress


def describe_exit(status: int) -> str:
    """Say how a process ended: `exit status 1`, `killed by SIGKILL`."""
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
