"""Start a program, wait until it says it is ready, stop it, and know whether it went in peace."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from conformance.targets.fault import TargetFault

LEASH = Path(__file__).with_name("leash.py")
TAIL_LINES = 30
KILL_SECONDS = 10.0
#: How long the rest of a session may outlive its leader. Children that the kernel tells of its death end a moment later.
GRACE_SECONDS = 2.0


class DidNotStart(TargetFault):
    """A process ended, or its time was over, before it said that it is ready. The text holds the end of its log."""


@dataclass(frozen=True)
class Ending:
    """How a process ended. `clean`: by itself, when asked, with status 0, and with nobody of its session left behind.

    `status` is the exit status, negative for a signal. `survivors` are processes of its session that had to be killed.
    """

    status: int
    killed: bool
    survivors: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return self.status == 0 and not self.killed and not self.survivors

    def __str__(self) -> str:
        parts = [f"exit status {self.status}"]
        if self.killed:
            parts.append("did not stop when asked and was killed")
        if self.survivors:
            parts.append(f"left behind: {', '.join(self.survivors)}")
        return "; ".join(parts)


class Process:
    """A running program in a session of its own. Its output goes to a log file; its stdout is watched for a ready line.

    Use `Process.start`; every started process has to be stopped.
    """

    def __init__(self, name: str, argv: Sequence[str], popen: subprocess.Popen[bytes], ready: str, log: Path) -> None:
        self.name = name
        self.argv = tuple(argv)
        self.log = log
        self.ending: Ending | None = None
        self._popen = popen
        self._pattern = re.compile(ready)
        self._match: re.Match[str] | None = None
        self._settled = threading.Event()  # the ready line was seen, or stdout has ended
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._readers = [
            threading.Thread(target=self._read, args=(stream, is_stdout), name=f"{name} log", daemon=True)
            for stream, is_stdout in ((popen.stdout, True), (popen.stderr, False))
        ]

    @classmethod
    def start(
        cls, name: str, argv: Sequence[str], *, ready: str, log: Path, environment: Mapping[str, str] | None = None
    ) -> Process:
        """Start a program without waiting for it. `environment` is added to this process's own."""
        popen = subprocess.Popen(
            [sys.executable, "-I", "-S", str(LEASH), str(os.getpid()), *argv],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        process = cls(name, argv, popen, ready, log)
        for reader in process._readers:
            reader.start()
        return process

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait_ready(self, seconds: float) -> re.Match[str]:
        """Return the match of the ready line. Raises `DidNotStart`, with the process stopped, if it ends or is too slow."""
        settled = self._settled.wait(seconds)
        if self._match is not None:
            return self._match
        why = f"ended with {self.stop()}" if settled else f"was not ready within {seconds:g} s, then {self.stop()}"
        last = self._tail[-1] if self._tail else "it wrote nothing"
        raise DidNotStart(
            f"{self.name} {why}: {last}\ncommand: {shlex.join(self.argv)}\nlog: {self.log}\n{self.tail()}"
        )

    def stop(self, asking: signal.Signals = signal.SIGTERM, seconds: float = 20.0) -> Ending:
        """Ask it to stop, wait, kill what is left of its session, and say how it went. May be called again."""
        if self.ending is not None:
            return self.ending
        if self.alive:
            self._popen.send_signal(asking)
        killed = not self._ends_within(seconds)
        if killed:
            self._popen.kill()
        status = self._popen.wait(KILL_SECONDS)
        survivors = self._kill_session()
        for reader in self._readers:
            reader.join(KILL_SECONDS)
        self.ending = Ending(status, killed, survivors)
        return self.ending

    def tail(self) -> str:
        """Return the last lines it wrote."""
        return "\n".join(f"  {line}" for line in self._tail) or "  (it wrote nothing)"

    def _ends_within(self, seconds: float) -> bool:
        """Wait for the end of the process, which the kernel tells at once (`Popen.wait` with a limit looks and sleeps)."""
        descriptor = os.pidfd_open(self.pid) if self.alive else None
        if descriptor is None:
            return True
        try:
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(descriptor)

    def _kill_session(self) -> tuple[str, ...]:
        """Kill every process that outlives the leader of this session, and describe them."""
        session = [process for process in psutil.process_iter() if _session(process) == self.pid]
        _, left = psutil.wait_procs(session, timeout=GRACE_SECONDS)
        described = tuple(_describe(process) for process in left)
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(left, timeout=KILL_SECONDS)
        return described

    def _read(self, stream: IO[bytes] | None, is_stdout: bool) -> None:
        assert stream is not None
        with stream, self.log.open("a", encoding="utf-8") as log:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip("\n")
                log.write(f"[{self.name}] {line}\n")
                log.flush()
                self._tail.append(line)
                if is_stdout and self._match is None and (match := self._pattern.search(line)):
                    self._match = match
                    self._settled.set()
        if is_stdout:
            self._settled.set()


def _session(process: psutil.Process) -> int | None:
    try:
        return None if process.status() == psutil.STATUS_ZOMBIE else os.getsid(process.pid)
    except (psutil.NoSuchProcess, ProcessLookupError, PermissionError):
        return None


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} ({shlex.join(process.cmdline())[:120]})"
    except psutil.NoSuchProcess:
        return str(process.pid)
