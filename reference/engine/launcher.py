"""The engine as a whole: an HTTP process, a worker process a rank, and in mode `daemon` the daemons before them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import reference
from reference.cache.supervisor import supervise
from reference.command_line import ENGINE, parse_args
from reference.context import get_cache, get_context, get_model, get_parallel, get_server, publish
from reference.engine.client import EngineClient, EngineState
from reference.engine.http import create_app, run_server
from reference.engine.rank import context_length, max_total_tokens, run_rank
from reference.engine.ranks import (
    Changed,
    Exited,
    Failed,
    Proceed,
    RankProcess,
    Ready,
    Report,
    describe_exit,
    events,
    fork_ranks,
    stop,
    wait,
)
from reference.engine.tokenizer import Tokenizer
from reference.errors import ArgumentRefusal, Refusal
from reference.parallel import check_served
from reference.weights.checkpoint import Checkpoint

_GRACE = 10.0  # seconds for ranks and daemons to end by themselves


def main(argv: Sequence[str]) -> int:
    """Serve a model over HTTP until SIGTERM or SIGINT. Returns the exit status."""
    try:
        publish(parse_args(argv, ENGINE), None)
        check_served()
        Engine().run()
    except Refusal as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


class Engine:
    """The processes of one engine, and what they told of themselves."""

    def __init__(self) -> None:
        """Check what can be checked at once and take the port. Raises `Refusal`; no process was started then."""
        checkpoint = Checkpoint.open(get_model().model_path)
        self._info: dict[int, dict[str, Any]] = {}
        self._state = EngineState(
            model_name=get_model().served_model_name or Path(get_model().model_path).resolve().name,
            tokenizer=Tokenizer.load(checkpoint.path),
            vocab_size=int(checkpoint.config["vocab_size"]),
            context_length=context_length(checkpoint),
            max_total_tokens=max_total_tokens(),
            server_info=self.server_info,
        )
        self._listener = _listen()
        self._daemons: list[RankProcess] = []
        self._ranks: list[RankProcess] = []

    def run(self) -> None:
        """Start the processes, serve until told to stop, end them. Raises `Refusal` where the engine fails."""
        requests, rank_0_requests = socket.socketpair()
        wakeup, woken = socket.socketpair()
        self._fork(rank_0_requests, (self._listener, requests, wakeup, woken))
        follower = threading.Thread(target=self._follow, args=(woken,), name="ranks")
        try:
            run_server(self._listener, create_app(EngineClient(requests), self._state), follower.start)
        finally:
            wakeup.send(b"end")
            if follower.ident is not None:
                follower.join()
            requests.close()
            self._end()
        if self._state.failure:
            raise Refusal(self._state.failure)

    def server_info(self) -> dict[str, Any]:
        """Return the body of `/server_info`."""
        ranks = [self._info[rank.rank] for rank in self._ranks if rank.rank in self._info]
        return {
            "version": reference.__version__,
            "arguments": get_context().arguments(),
            "published": get_context().snapshot(),
            "overrides": get_context().overrides(),
            "ready": self._state.ready,
            "pids": [os.getpid(), *(rank.pid for rank in self._ranks)],
            "ranks": ranks,
        }

    def _fork(self, rank_0_requests: socket.socket, own: tuple[socket.socket, ...]) -> None:
        # Before any thread exists: a fork copies only the thread that forks.
        if get_cache().weight_cache_mode == "daemon":
            detach = get_cache().weight_cache_detach
            main_ = _run_detached if detach else _run_daemon
            self._daemons = fork_ranks(1, main_, None if detach else signal.SIGTERM, (*own, rank_0_requests))
        world_size = get_parallel().world_size
        rendezvous = socket.create_server(("127.0.0.1", 0)) if world_size > 1 else None

        def run(rank: int, report: Report) -> None:
            run_rank(rank, report, rendezvous, rank_0_requests if rank == 0 else None)

        daemons = (daemon.channel for daemon in self._daemons)
        self._ranks = fork_ranks(world_size, run, signal.SIGKILL, (*own, *daemons))
        rank_0_requests.close()
        if rendezvous is not None:
            rendezvous.close()

    def _follow(self, woken: socket.socket) -> None:
        """Take in what the processes tell, until all have ended or `woken` has something to read."""
        for process, event in events([*self._daemons, *self._ranks], woken):
            if process is None:
                return
            is_daemon = process in self._daemons
            match event:
                case Ready() if is_daemon:
                    for rank in self._ranks:
                        rank.channel.send(Proceed())
                case Ready(info):
                    self._info[process.rank] = info
                    if len(self._info) == len(self._ranks):
                        self._state.ready = True
                        host, port = self._listener.getsockname()[:2]
                        print(f"ready: http://{host}:{port}", flush=True)
                case Changed(info):
                    self._info[process.rank] |= info
                    print(
                        f"warning: rank {process.rank}: weight cache daemon is gone, serving goes on",
                        file=sys.stderr,
                        flush=True,
                    )
                case Failed(message):
                    self._fail(message)
                # A rank leaves its loop only when the HTTP process told it to: the engine is being stopped.
                case Exited(0) if self._state.ready:
                    pass
                case Exited(status):
                    who = "weight cache daemon" if is_daemon else f"rank {process.rank}"
                    if not (is_daemon and self._state.ready):
                        self._fail(f"{who} ended ({describe_exit(status)}); the engine was stopped")

    def _fail(self, message: str) -> None:
        # The first reason is the cause; what follows are its effects.
        if self._state.failure is None:
            self._state.failure = message
            self._state.ready = False
            # The HTTP server owns the main thread, and ends as for anyone's SIGTERM.
            os.kill(os.getpid(), signal.SIGTERM)

    def _end(self) -> None:
        if self._state.ready:
            # Their request stream has ended, so the ranks leave their loop together.
            wait(self._ranks, _GRACE)
        else:
            stop(self._ranks, signal.SIGKILL, _GRACE)
        if not (get_cache().weight_cache_detach and self._state.ready):
            stop(self._daemons, signal.SIGTERM, _GRACE)


def _listen() -> socket.socket:
    host, port = get_server().host, get_server().port
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise ArgumentRefusal(
            f"--host/--port: can't listen on {host}:{port}: {error.strerror}; give --port 0 for a free one"
        ) from None


def _run_daemon(_: int, report: Report) -> None:
    supervise(lambda text: report.send(Ready({"text": text})))


def _run_detached(rank: int, report: Report) -> None:
    os.setsid()
    # It outlives the engine, so it must not hold the engine's streams; what fails is told by event.
    with open(os.devnull, "r+b") as null:
        for descriptor in (0, 1, 2):
            os.dup2(null.fileno(), descriptor)
    _run_daemon(rank, report)
