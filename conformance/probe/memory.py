"""What the kernel says of a process: which shared memory it maps, what it has open, how large it is (Linux)."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from conformance.probe.wcp1 import FileIdentity

_HEAD = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) [0-9a-f]+ ([0-9a-f]+):([0-9a-f]+) (\d+)\s*(.*)$")


@dataclass(frozen=True)
class Mapping:
    """One mapping of a process: its bytes, permissions as in `/proc/PID/maps`, resident bytes, and what it maps."""

    size: int
    permissions: str
    resident: int
    identity: FileIdentity
    path: str

    @property
    def writable(self) -> bool:
        return "w" in self.permissions


def mappings(pid: int) -> list[Mapping]:
    """Return the mappings of a process. Raises ProcessLookupError or PermissionError."""
    try:
        text = Path(f"/proc/{pid}/smaps").read_text("utf-8", "replace")
    except FileNotFoundError:
        raise ProcessLookupError(f"no process {pid}") from None
    found: list[Mapping] = []
    head: re.Match[str] | None = None
    for line in text.splitlines():
        if match := _HEAD.match(line):
            head = match
        elif head is not None and line.startswith("Rss:"):
            start, stop, permissions, major, minor, inode, path = head.groups()
            identity = FileIdentity(int(major, 16), int(minor, 16), int(inode))
            size = int(stop, 16) - int(start, 16)
            found.append(Mapping(size, permissions, int(line.split()[1]) * 1024, identity, path))
            head = None
    return found


@dataclass(frozen=True)
class Footprint:
    """What a process holds: open descriptors, mappings of anonymous shared memory, threads, resident anonymous bytes.

    Anonymous bytes count pages whether or not they are shared with the process that was forked: memory that is counted
    as private only grows when *another* process writes to its copy of a page, or ends.
    """

    descriptors: int
    memfd_mappings: int
    threads: int
    anonymous_bytes: int


def footprint(pid: int) -> Footprint:
    """Measure a process. Raises psutil.NoSuchProcess."""
    process = psutil.Process(pid)
    mapped = sum(" /memfd:" in line for line in Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines())
    return Footprint(process.num_fds(), mapped, process.num_threads(), _anonymous_bytes(pid))


def _anonymous_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text("utf-8", "replace")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon:"))


def shared_memory_files() -> set[str]:
    """Return the names in /dev/shm."""
    return set(os.listdir("/dev/shm"))


def unowned_shared_memory(names: set[str]) -> set[str]:
    """Return those files of /dev/shm that no living process maps or has open: memory that nobody will give back."""
    in_use: set[str] = set()
    for pid in psutil.pids() if names else ():
        try:
            maps = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace")
            in_use |= {Path(line.split(None, 5)[5]).name for line in maps.splitlines() if " /dev/shm/" in line}
            for entry in os.scandir(f"/proc/{pid}/fd"):
                target = os.readlink(entry.path)
                if target.startswith("/dev/shm/"):
                    in_use.add(Path(target).name)
        except (ProcessLookupError, PermissionError, FileNotFoundError):
            continue
    return names - in_use
