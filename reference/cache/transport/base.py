"""What a transport must do: allocate a slab, seal and export it, attach it read-only in another process."""

from __future__ import annotations

from typing import Protocol

import torch


class Slab(Protocol):
    """Memory for one rank's tensors. `descriptor` is what another process needs to attach."""

    size: int

    @property
    def descriptor(self) -> int:
        """The file descriptor to pass over the socket. It stays the slab's own."""

    def writable(self) -> torch.Tensor:
        """Return the slab as `[size]` uint8 for filling. Every view must be gone before `seal`."""

    def seal(self) -> None:
        """Give up writing for good: no process can write this memory from now on."""

    def tensor(self) -> torch.Tensor:
        """Return the sealed slab as `[size]` uint8. A write through it ends the writer, not the bytes."""

    def close(self) -> None:
        """Drop this process's hold. Memory is freed when the last holder has."""
