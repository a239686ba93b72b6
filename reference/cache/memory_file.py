"""Sealed memfds for documents that travel beside a message: manifests, tensor digests."""

from __future__ import annotations

import fcntl
import os

from reference.errors import CacheRefusal

SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def seal_bytes(name: str, data: bytes) -> int:
    """Return the descriptor of a new memfd that holds `data` and can't be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return descriptor


def read_bytes(descriptor: int, size: int) -> bytes:
    """Return the `size` bytes behind a descriptor from a daemon and close it.

    Raises `CacheRefusal` (`protocol`) where it is not a sealed memfd of that size.
    """
    try:
        check_sealed(descriptor, size, "document")
        data = b""
        while len(data) < size and (part := os.pread(descriptor, size - len(data), len(data))):
            data += part
        return data
    finally:
        os.close(descriptor)


def check_sealed(descriptor: int, size: int, what: str) -> None:
    """Raise `CacheRefusal` (`protocol`) unless `descriptor` is a memfd of `size` bytes that nobody can change."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        raise CacheRefusal("protocol", f"daemon's {what} is not a memfd; it must be one for transport shm") from None
    actual = os.fstat(descriptor).st_size
    if seals & SEALS != SEALS or actual != size:
        raise CacheRefusal(
            "protocol",
            f"daemon's {what} has {actual} bytes and seals {seals:#x}, not {size} and {SEALS:#x}; restart the daemon",
        )
