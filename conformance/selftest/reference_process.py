"""The reference's command lines as processes, through one fork server: for tests that look at it from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from conformance.targets import Process

SECONDS = 60


@dataclass
class Workshop:
    """Starts daemons and engines on one private registry, and ends them."""

    directory: Path
    environment: dict[str, str]
    processes: list[Process] = field(default_factory=list)

    @property
    def registry(self) -> Path:
        """`$WEIGHT_CACHE_DIR` of everything started here."""
        return Path(self.environment["WEIGHT_CACHE_DIR"])

    def daemon(self, model: Path, *extra: str) -> Process:
        """Start a daemon and wait until it is ready."""
        process = self._start("daemon", ["reference.daemon", "--model-path", str(model), *extra])
        process.wait_ready(SECONDS)
        return process

    def engine(self, model: Path, *extra: str) -> tuple[Process, str]:
        """Start an engine on a free port and wait until it is ready. Returns it and its URL."""
        process = self._start("engine", ["reference.engine", "--model-path", str(model), "--port", "0", *extra])
        return process, process.wait_ready(SECONDS)["url"]

    def refused(self, command: str, *arguments: str) -> str:
        """Run a command that must not start, and return its one line of error."""
        done = subprocess.run(
            [sys.executable, "-m", f"reference.{command}", *arguments],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 1, (done.returncode, done.stdout, done.stderr)
        assert "ready:" not in done.stdout
        assert "Traceback" not in done.stderr
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, done.stderr
        return errors[0]

    def left_over(self) -> list[str]:
        """Return what is in the registry besides the memory of file contents."""
        found = []
        # Unlike Path.rglob, os.walk bears with a directory that is being removed.
        for directory, directories, files in os.walk(self.registry):
            found += [os.path.relpath(os.path.join(directory, name), self.registry) for name in directories + files]
        return sorted(name for name in found if not name.startswith("digests"))

    def stop_all(self) -> None:
        """End everything that was started here; engines before the daemons they map."""
        while self.processes:
            self.processes.pop().stop(signal.SIGTERM)

    def _start(self, name: str, argv: Sequence[str]) -> Process:
        process = Process.start(
            name,
            [sys.executable, "-m", *argv],
            ready=r"^ready: (?P<url>\S+)",
            log=self.directory / "log",
            environment=self.environment,
        )
        self.processes.append(process)
        return process


@contextmanager
def open_workshop() -> Iterator[Workshop]:
    """Start a fork server and give a workshop whose processes come from it; end all of it afterwards."""
    # Not below pytest's own directory: a Unix socket's path has to be short.
    with tempfile.TemporaryDirectory(prefix="wcc-") as name:
        directory = Path(name)
        socket = directory / "fork-server"
        server = Process.start(
            "fork server",
            [sys.executable, "-m", "reference.engine.forkserver", "--socket", str(socket)],
            ready="^ready: ",
            log=directory / "log",
        )
        server.wait_ready(SECONDS)
        registry = directory / "r"
        registry.mkdir(mode=0o700)
        environment = {"WEIGHT_CACHE_FORK_SERVER": str(socket), "WEIGHT_CACHE_DIR": str(registry)}
        workshop = Workshop(directory, environment)
        try:
            yield workshop
        finally:
            workshop.stop_all()
            assert server.stop().clean
