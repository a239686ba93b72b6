"""The processes of one unit: a daemon, engines, and what can be known of them from outside."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import psutil

from conformance.probe.memory import shared_memory_files, unowned_shared_memory
from conformance.probe.registry import Place, leftovers, places
from conformance.probe.wcp1 import Connection, Status
from conformance.run import Run
from conformance.targets import Ending, Process, Target, TargetFault
from conformance.targets.http import EngineClient
from conformance.targets.target import Command

#: How long something may take that the kernel tells nobody about, such as another process closing a descriptor.
SETTLE_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 0.01


def settles(condition: Callable[[], bool], seconds: float = SETTLE_SECONDS) -> bool:
    """Return whether a condition on another process holds, now or soon. For what no event can be awaited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_LOOK_AGAIN_SECONDS)
    return True


@dataclass(frozen=True)
class DaemonRank:
    """One rank's daemon as the probe met it."""

    place: Place
    status: Status

    def ask(self) -> Status:
        """Return its status of now. Raises `ProtocolError`."""
        with Connection(self.place.socket) as connection:
            return connection.status()


@dataclass(frozen=True)
class Engine:
    """A running engine and a client of it."""

    process: Process
    client: EngineClient


class Launcher:
    """Starts the target's processes for a whole session. Holds the fork server, where the target has one."""

    def __init__(self, target: Target, run: Run, worker: str) -> None:
        self.target = target
        self.run = run
        self.directory = run.directory / worker
        self.directory.mkdir(exist_ok=True)
        self.environment = dict(target.environment)
        self.fork_server: Process | None = None
        self._numbers = itertools.count()
        if target.fork_server is not None:
            self.fork_server = self._start_fork_server(target.fork_server)

    def unit(self, name: str, model: Path, arguments: Sequence[str], transport: str | None) -> Unit:
        """Return an empty unit with a registry of its own. Use it as a context manager."""
        return Unit(self, name, self.directory / f"u{next(self._numbers)}", model, arguments, transport)

    def members(self) -> set[psutil.Process]:
        """Return the processes that run under the fork server."""
        return _descendants(self.fork_server) if self.fork_server else set()

    def close(self) -> None:
        if self.fork_server:
            self.fork_server.stop(self.target.signal, self.target.stop_seconds)

    def _start_fork_server(self, command: Command) -> Process:
        socket = self.directory / "fork-server"
        argv = command.argv(socket=str(socket))
        log = self.run.directory / f"fork-server-{self.directory.name}.log"
        process = Process.start("fork server", argv, ready=command.ready, log=log, environment=self.environment)
        process.wait_ready(command.seconds)
        if command.variable:
            self.environment[command.variable] = str(socket)
        return process


class Unit:
    """The processes of one test class. Leaving the context stops and kills whatever still runs."""

    def __init__(
        self,
        launcher: Launcher,
        name: str,
        registry: Path,
        model: Path,
        arguments: Sequence[str],
        transport: str | None,
    ) -> None:
        self.name = name
        self.registry = registry
        self.model = model
        self.log = launcher.run.directory / f"{name}.log"
        self.at_ready: tuple[DaemonRank, ...] = ()
        self._launcher = launcher
        self._target = launcher.target
        self._arguments = tuple(arguments)
        self._transport = transport
        self._processes: list[Process] = []
        self._clients: list[EngineClient] = []
        self._numbers = itertools.count(1)
        self._members: set[psutil.Process] = set()
        self._shared_memory = shared_memory_files()
        registry.mkdir(mode=0o700)

    def __enter__(self) -> Unit:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start_daemon(self, extra: Sequence[str] = ()) -> Process:
        """Start a daemon and wait until it says it is ready; `at_ready` is what the probe saw at that moment.

        Raises `DidNotStart`.
        """
        arguments = [*self._arguments, *self._target.transport_arguments(self._transport), *extra]
        process, _ = self._start("daemon", self._target.daemon, arguments)
        self.at_ready = self.daemons()
        return process

    def start_engine(self, mode: str, extra: Sequence[str] = ()) -> Engine:
        """Start an engine and wait until it says it is ready. Raises `DidNotStart`."""
        arguments = [*self._arguments, *self._target.mode_arguments(mode, self._transport), *extra]
        name = f"engine {next(self._numbers)} ({mode})"
        process, url = self._start(name, self._target.server, arguments)
        if mode == "daemon":
            self.at_ready = self.daemons()
        client = EngineClient(url)
        self._clients.append(client)
        return Engine(process, client)

    def stop_process(self, process: Process) -> Ending:
        """Stop one process of this unit."""
        return process.stop(self._target.signal, self._target.stop_seconds)

    def stop(self) -> dict[str, Ending]:
        """Stop all processes, engines before daemons, and say how each ended."""
        self._members |= self.members() | self._announced()
        for client in self._clients:
            client.close()
        return {process.name: self.stop_process(process) for process in reversed(self._processes)}

    def daemons(self) -> tuple[DaemonRank, ...]:
        """Return every daemon rank that answers in the registry. Raises `ProtocolError` where one doesn't."""
        found = []
        for place in places(self.registry):
            with Connection(place.socket) as connection:
                found.append(DaemonRank(place, connection.status()))
        return tuple(found)

    def members(self) -> set[psutil.Process]:
        """Return all processes of this unit that live now."""
        found = self._launcher.members()
        for process in self._processes:
            found |= _descendants(process) if process.alive else set()
        return found

    def _announced(self) -> set[psutil.Process]:
        """Return the processes that engines and daemons say are theirs; a target may start some that are no descendants."""
        pids: set[int] = set()
        for client in self._clients:
            with suppress(TargetFault):
                pids |= set(client.server_info().pids)
        with suppress(TargetFault):
            pids |= {rank.status.pid for rank in self.daemons()}
        return {psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)}

    def remains(self) -> list[str]:
        """Return what is left of a stopped unit, a line each: processes, registry entries, shared memory."""
        self._members = {process for process in self._members if _lives(process)}
        settles(lambda: not any(_lives(process) for process in self._members))
        left = [f"process {process.pid} ({process.name()})" for process in self._members if _lives(process)]
        left += [f"{self.registry}/{name}" for name in leftovers(self.registry)]
        new = shared_memory_files() - self._shared_memory
        return left + [f"/dev/shm/{name}" for name in sorted(unowned_shared_memory(new))]

    def _start(self, name: str, command: Command, arguments: Sequence[str]) -> tuple[Process, str]:
        environment = {**self._launcher.environment, "WEIGHT_CACHE_DIR": str(self.registry)}
        argv = command.argv(arguments, model=str(self.model))
        process = Process.start(name, argv, ready=command.ready, log=self.log, environment=environment)
        self._processes.append(process)
        ready = process.wait_ready(command.seconds)
        self._members |= self.members()
        return process, ready.groupdict().get("url") or ""


def _descendants(process: Process) -> set[psutil.Process]:
    try:
        return set(psutil.Process(process.pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _lives(process: psutil.Process) -> bool:
    return bool(process.is_running())
