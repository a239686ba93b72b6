"""Where daemons are found: `<root>/<device>/<key>/` with socket, status file and lock.

The lock is held as long as the daemon lives, so that the kernel frees it at any death; what a dead daemon left is
cleared by the next one with its key. Two jobs on one device don't meet unless their keys are equal.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
from filelock import FileLock, Timeout

from reference.errors import CacheRefusal

# sun_path of sockaddr_un holds 108 bytes, the closing zero included.
_MAX_SOCKET_PATH = 107


class StatusFile(msgspec.Struct, frozen=True):
    """What `status.json` says, for people and tools that do not speak the wire protocol. `started` is Unix seconds."""

    pid: int
    instance: str
    state: str
    key: str
    layout_hash: str
    device: str
    model_path: str
    started: float


def root() -> Path:
    """Return the registry's directory, made private to this user.

    `$WEIGHT_CACHE_DIR`, else `$XDG_RUNTIME_DIR/weight-cache`, else `weight-cache-<uid>` in the temporary directory.
    Raises `CacheRefusal` (`registry`) where it is another user's, open to others, or no directory.
    """
    if given := os.environ.get("WEIGHT_CACHE_DIR"):
        path = Path(given)
    elif runtime := os.environ.get("XDG_RUNTIME_DIR"):
        path = Path(runtime) / "weight-cache"
    else:
        path = Path(tempfile.gettempdir()) / f"weight-cache-{os.getuid()}"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat()
    except OSError as error:
        raise CacheRefusal(
            "registry", f"{path}: {error.strerror}; set WEIGHT_CACHE_DIR to a directory of your own"
        ) from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise CacheRefusal(
            "registry",
            f"{path}: must be a directory of user {os.getuid()} with mode 0700, has owner {info.st_uid} and mode"
            f" {stat.S_IMODE(info.st_mode):04o}; mend it or set WEIGHT_CACHE_DIR",
        )
    return path


def digest_store() -> Path:
    """Return the directory of content digests by file identity."""
    path = root() / "digests"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


@dataclass(frozen=True)
class Place:
    """One daemon's directory in the registry."""

    path: Path

    @property
    def socket(self) -> Path:
        """The daemon's Unix socket."""
        return self.path / "socket"

    @property
    def status(self) -> Path:
        """The status file."""
        return self.path / "status.json"

    @property
    def lock(self) -> Path:
        """The lock file, held by the living daemon."""
        return self.path / "lock"


def place(device: str, key: str) -> Place:
    """Return where the daemon of a key on a device is, or would be."""
    return Place(root() / device / key.replace(":", "-"))


def check_socket_path(device: str) -> None:
    """Refuse, before anything is loaded, a registry whose sockets would have too long a path."""
    path = place(device, "wk1:" + "0" * 32).socket
    length = len(os.fsencode(path))
    if length > _MAX_SOCKET_PATH:
        raise CacheRefusal(
            "registry",
            f"{path}: a socket's path may have {_MAX_SOCKET_PATH} bytes, this has {length}; set"
            " WEIGHT_CACHE_DIR to a shorter one",
        )


def places(device: str) -> list[Place]:
    """Return every place on a device, of living and dead daemons, newest first."""
    changed: dict[Path, int] = {}
    with contextlib.suppress(FileNotFoundError):
        for path in (root() / device).glob("wk1-*"):
            # One that goes while it is looked at hides no other.
            with contextlib.suppress(FileNotFoundError):
                changed[path] = path.stat().st_mtime_ns
    return [Place(path) for path in sorted(changed, key=lambda path: changed[path], reverse=True)]


class Claim:
    """A daemon's hold on its place, from before it loads until it ends."""

    def __init__(self, device: str, key: str) -> None:
        """Take the place. Raises `CacheRefusal` (`daemon_exists`) where a living daemon has it."""
        self.place = place(device, key)
        while True:
            self._lock = FileLock(str(self.place.lock), mode=0o600, fallback_to_soft=False)
            try:
                self.place.path.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock.acquire(blocking=False)
            except Timeout:
                raise CacheRefusal(
                    "daemon_exists",
                    f"{self.place.path}: a daemon{_holder(self.place)} already holds this key on {device}; attach with"
                    " --weight-cache-mode client, or stop it",
                ) from None
            except (FileNotFoundError, FileExistsError):
                # A daemon that ends removed the directory just now, while it was found to be there or opened.
                if self.place.path.is_file():
                    raise
                continue
            break
        for path in (self.place.socket, self.place.status, self._scratch):
            path.unlink(missing_ok=True)

    @property
    def _scratch(self) -> Path:
        return self.place.status.with_suffix(".tmp")

    def write_status(self, status: StatusFile) -> None:
        """Replace the status file in one step."""
        self._scratch.write_bytes(msgspec.json.format(msgspec.json.encode(status)) + b"\n")
        self._scratch.rename(self.place.status)

    def release(self) -> None:
        """Remove everything this daemon put into the registry, the lock last."""
        for path in (self.place.socket, self.place.status, self._scratch, self.place.lock):
            path.unlink(missing_ok=True)
        self._lock.release()
        for directory in (self.place.path, self.place.path.parent):
            try:
                directory.rmdir()
            except OSError:
                break


def _holder(where: Place) -> str:
    try:
        status = msgspec.json.decode(where.status.read_bytes(), type=StatusFile)
    except (OSError, msgspec.MsgspecError):
        return ""
    return f" (pid {status.pid}, {status.state})"


def clear_dead(device: str, key: str) -> None:
    """Remove what a killed daemon left at its place. Where another one lives there by now, nothing is touched."""
    if place(device, key).path.exists():
        with contextlib.suppress(CacheRefusal):
            Claim(device, key).release()


def owner() -> int:
    """Return the user id whose daemons are trusted: this process's own."""
    return os.getuid()
