"""The `shm` transport: a memfd, sealed against writing, mapped read-only. For where there is no GPU.

The kernel frees the memory when the last descriptor and mapping are gone, however their owners ended; there is no name
in a file system that could be left over. Source: memfd_create(2), fcntl(2) on file seals.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import warnings

import psutil
import torch

from reference.cache.memory_file import SEALS, check_sealed
from reference.errors import CacheRefusal


class ShmSlab:
    """A slab in a memfd. Made by `allocate` in the daemon, or by `attach` over a descriptor that came by socket."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.size = size
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None

    def writable(self) -> torch.Tensor:
        """Return the slab as `[size]` uint8 for filling."""
        self._map = mmap.mmap(self.descriptor, self.size)
        return torch.frombuffer(self._map, dtype=torch.uint8)

    def seal(self) -> None:
        """Unmap the writable view and seal the memfd. Touching a view of it that is left ends the process."""
        if self._map is not None:
            self._map.close()
            self._map = None
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, SEALS)

    def tensor(self) -> torch.Tensor:
        """Return the sealed slab as `[size]` uint8 over a read-only mapping."""
        if self._map is None:
            # Private and never written, so the pages are the memfd's own. Linux before 6.7 refuses a shared mapping of a
            # memfd that is sealed against writing, even a read-only one.
            self._map = mmap.mmap(self.descriptor, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            return torch.frombuffer(self._map, dtype=torch.uint8)

    def close(self) -> None:
        """Close the descriptor. The mapping goes with the last tensor over it."""
        os.close(self.descriptor)
        self._map = None


def allocate(size: int) -> ShmSlab:
    """Return a new slab of `size` zero bytes. Raises `CacheRefusal` (`load_failed`) where the kernel refuses the size.

    Memory is taken page by page as the slab is filled.
    """
    # The kernel hands pages out when they are written: without this look it would kill a process instead of refusing.
    available = psutil.virtual_memory().available
    if size > available:
        raise CacheRefusal("load_failed", f"slab of {size:,} bytes: {available:,} bytes of memory are free; free some")
    descriptor = os.memfd_create("weight-cache-slab", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise CacheRefusal(
            "load_failed", f"slab of {size} bytes: {error.strerror}; free memory and try again"
        ) from None
    return ShmSlab(descriptor, size)


def attach(descriptor: int, size: int) -> ShmSlab:
    """Return a slab over a descriptor from a daemon.

    Raises `CacheRefusal` (`protocol`) where it is not a sealed memfd of that size: its bytes could change under us.
    """
    check_sealed(descriptor, size, "slab")
    return ShmSlab(descriptor, size)
