"""Rank arithmetic and process groups.

Groups exist in two forms: with a backend (an engine's ranks, which compute together) and without (a daemon's rank, or a
plan made for a rank that is not running), where sizes and ranks are all that is asked for.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from reference.context import get_parallel, install_group

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# An idle engine's ranks wait in a broadcast for as long as nobody asks anything; a dead peer is noticed by its closed
# connection, not by this limit.
_IDLE_FOREVER = timedelta(days=365)
_HEADER = 4096


@dataclass(frozen=True)
class Group:
    """Ranks that act together. `ranks` are world ranks; `rank` is this process's index among them."""

    name: str
    ranks: tuple[int, ...]
    rank: int
    process_group: ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the group, in place; every rank gets the same bits."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.process_group)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenate the ranks' tensors (equal shapes) along `dim`, in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        dist.all_gather(parts, tensor.contiguous(), group=self.process_group)
        return torch.cat(parts, dim=dim)

    def broadcast_bytes(self, data: bytes | None) -> bytes:
        """Give rank 0's bytes to every rank. One message for what fits 4 KiB, two for more."""
        if self.size == 1:
            assert data is not None
            return data
        head = torch.zeros(_HEADER, dtype=torch.uint8)
        if data is not None:
            start = len(data).to_bytes(8, "little") + data[: _HEADER - 8]
            head[: len(start)] = torch.frombuffer(bytearray(start), dtype=torch.uint8)
        dist.broadcast(head, src=self.ranks[0], group=self.process_group)
        received = head.numpy().tobytes()
        length = int.from_bytes(received[:8], "little")
        if length <= _HEADER - 8:
            return received[8 : 8 + length]
        rest = torch.empty(length - (_HEADER - 8), dtype=torch.uint8)
        if data is not None:
            rest.copy_(torch.frombuffer(bytearray(data[_HEADER - 8 :]), dtype=torch.uint8))
        dist.broadcast(rest, src=self.ranks[0], group=self.process_group)
        return received[8:] + rest.numpy().tobytes()


def tp_ranks(world_rank: int, tp_size: int) -> tuple[int, ...]:
    """Return the world ranks of the tensor parallel group that `world_rank` is in."""
    first = world_rank // tp_size * tp_size
    return tuple(range(first, first + tp_size))


def initialize_groups(world_rank: int, rendezvous: socket.socket | None = None) -> None:
    """Make this rank's groups, of the published sizes, and let the published configuration read them.

    `rendezvous` is a listening TCP socket on loopback that all ranks inherited; without it groups are arithmetic only.
    """
    process_group = None
    tp_size = get_parallel().configured("tp_size")
    if rendezvous is not None and tp_size > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host, port = rendezvous.getsockname()[:2]
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported by torch without saying so
            host,
            port,
            tp_size,
            is_master=world_rank == 0,
            wait_for_workers=False,
            master_listen_fd=rendezvous.detach() if world_rank == 0 else None,
            use_libuv=True,
        )
        rendezvous.close()
        dist.init_process_group("gloo", store=store, rank=world_rank, world_size=tp_size, timeout=_IDLE_FOREVER)
        process_group = dist.group.WORLD
    ranks = tp_ranks(world_rank, tp_size)
    install_group("tp", Group("tp", ranks, ranks.index(world_rank), process_group))


def destroy_groups() -> None:
    """Take the backend down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_name() -> str:
    """Return the registry's name of this rank's device: `cpu-<index>`."""
    return f"cpu-{get_parallel().base_gpu_id + get_parallel().local_rank}"
