"""A target's description: one TOML file that says how its daemon and engine are started."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
MODES = ("off", "client", "daemon")


class BadTarget(Exception):
    """A target's file can't be found, or says something that makes no sense; the text names the file and the field."""


@dataclass(frozen=True)
class Command:
    """One kind of process: its argument template, what its ready line looks like, and how long it may take to print it.

    `{name}` in an argument is replaced; an argument that is `{arguments}` alone becomes any number of arguments.
    """

    command: tuple[str, ...]
    ready: str
    seconds: float = 120.0
    variable: str | None = None

    def argv(self, arguments: Sequence[str] = (), **values: str) -> list[str]:
        """Return the command line. Raises KeyError for a placeholder that has no value."""
        found: list[str] = []
        for part in self.command:
            found += arguments if part == "{arguments}" else [part.format(python=sys.executable, **values)]
        return found


@dataclass(frozen=True)
class ModeArguments:
    """What each weight-cache mode, a transport and a device add to a command line."""

    off: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    daemon: tuple[str, ...] = ()
    transport: tuple[str, ...] = ()
    device: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """An implementation under test. `features` are what it declares to support; `version` prints its version."""

    name: str
    daemon: Command
    server: Command
    version: tuple[str, ...]
    description: str = ""
    stop_signal: str = "SIGTERM"
    stop_seconds: float = 20.0
    features: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    fork_server: Command | None = None
    arguments: ModeArguments = field(default_factory=ModeArguments)
    path: str = ""

    @property
    def signal(self) -> signal.Signals:
        """The signal that asks one of its processes to stop."""
        return signal.Signals[self.stop_signal]

    def mode_arguments(self, mode: str, transport: str | None) -> list[str]:
        """Return what an engine of this mode is started with. Raises KeyError for an unknown mode."""
        chosen = {"off": self.arguments.off, "client": self.arguments.client, "daemon": self.arguments.daemon}[mode]
        return [*chosen, *(self.transport_arguments(transport) if mode != "off" else [])]

    def transport_arguments(self, transport: str | None) -> list[str]:
        """Return what chooses a transport, for a daemon or an engine."""
        return [part.format(transport=transport) for part in self.arguments.transport] if transport else []

    def device_arguments(self, device: str) -> list[str]:
        """Return what chooses a device, for a daemon or an engine."""
        return [part.format(device=device) for part in self.arguments.device]

    def ask_version(self) -> str:
        """Return what the version command prints, or a line that says why it could not be asked."""
        argv = [part.format(python=sys.executable) for part in self.version]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"unknown ({error})"
        lines = done.stdout.strip().splitlines()
        return lines[-1] if done.returncode == 0 and lines else f"unknown (exit status {done.returncode})"


def load_target(name: str) -> Target:
    """Return the target called `name`, which is one of this folder's or a path that ends in `.toml`.

    Raises `BadTarget`.
    """
    path = Path(name) if name.endswith(".toml") else HERE / f"{name}.toml"
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text("utf-8"))
        target = msgspec.convert(content | {"path": str(path)}, Target)
        _check(target)
    except FileNotFoundError:
        known = ", ".join(sorted(file.stem for file in HERE.glob("*.toml")))
        raise BadTarget(f"{path}: no such target; there are {known}, or give the path of a .toml file") from None
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, ValueError) as error:
        raise BadTarget(f"{path}: {error}") from error
    return target


def _check(target: Target) -> None:
    for kind, command, group in (("daemon", target.daemon, "ranks"), ("server", target.server, "url")):
        try:
            groups = re.compile(command.ready).groupindex
        except re.error as error:
            raise ValueError(f"{kind}.ready: {error}") from error
        if group not in groups:
            raise ValueError(f"{kind}.ready: {command.ready!r} has no group (?P<{group}>...)")
    if target.stop_signal not in signal.Signals.__members__:
        raise ValueError(f"stop_signal: {target.stop_signal!r} is no signal")
