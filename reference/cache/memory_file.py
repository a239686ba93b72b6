"""Sealed memfds for documents that travel beside a message: manifests, tensor digests."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


def seal_bytes(name: str, data: bytes) -> int:
    """Return the descriptor of a new memfd that holds `data` and can't be changed."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    return descriptor


def read_bytes(descriptor: int, size: int) -> bytes:
    """Return the `size` bytes behind a descriptor and close it."""
    try:
        data = b""
        while len(data) < size and (part := os.pread(descriptor, size - len(data), len(data))):
            data += part
        return data
    finally:
        os.close(descriptor)
