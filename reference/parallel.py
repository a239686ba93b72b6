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

from reference.context import get_context, get_exec, get_model, get_parallel, install_group
from reference.errors import ArgumentRefusal
from reference.topology import GROUPS

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


def initialize_groups(rendezvous: socket.socket | None = None) -> None:
    """Make every group of this rank, of the published sizes, and let the published configuration read them.

    `rendezvous` is a listening TCP socket on loopback that all ranks inherited; without it groups are arithmetic only.
    """
    topology, rank = get_context().topology(), get_parallel().world_rank
    backend = rendezvous is not None and topology.world_size > 1
    if backend:
        assert rendezvous is not None
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        host, port = rendezvous.getsockname()[:2]
        store = dist.TCPStore(  # type: ignore[attr-defined]  # exported by torch without saying so
            host,
            port,
            topology.world_size,
            is_master=rank == 0,
            wait_for_workers=False,
            master_listen_fd=rendezvous.detach() if rank == 0 else None,
            use_libuv=True,
        )
        rendezvous.close()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=topology.world_size, timeout=_IDLE_FOREVER)
    made: dict[tuple[int, ...], ProcessGroup | None] = {}
    if backend:
        made[tuple(range(topology.world_size))] = dist.group.WORLD
    for name in GROUPS:
        # Making a process group is collective: every rank makes all of them, in one order, and equal ones once.
        for ranks in topology.groups(name):
            if backend and len(ranks) > 1 and ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=_IDLE_FOREVER)
        mine = topology.group(name, rank)
        install_group(name, Group(name, mine, mine.index(rank), made.get(mine)))


def require_mlp_tp_gather() -> bool:
    """Say whether a dense MLP's input is gathered over the tensor parallel ranks rather than reduced.

    Source: SGLang's function of this name.
    """
    parallel = get_parallel()
    if not parallel.enable_dp_attention:
        return False
    if parallel.moe_dense_tp_size is None or not parallel.enable_dp_lm_head:
        return True
    if get_exec().moe.moe_a2a_backend == "none":
        return True
    return bool(parallel.moe_dense_tp_size > parallel.tp_size // parallel.attn_dp_size)


def require_attn_tp_gather() -> bool:
    """Say whether attention's input is scattered, so that it is gathered over the attention ranks.

    Source: SGLang's function of this name.
    """
    parallel = get_parallel()
    if get_exec().moe.moe_a2a_backend == "none" and parallel.moe_dense_tp_size != 1:
        return False
    return bool(not parallel.enable_dp_attention or parallel.attn_dp_size < parallel.tp_size)


def require_mlp_sync() -> bool:
    """Say whether ranks must agree on each batch before they run it, idle ones included. Source: as above."""
    return bool(get_parallel().enable_dp_attention or require_mlp_tp_gather() or require_attn_tp_gather())


def check_served() -> None:
    """Refuse published layouts that no rank of this version can run. Raises `ArgumentRefusal`."""
    parallel, moe = get_parallel(), get_exec().moe
    topology = get_context().topology()
    for flag, given in (
        ("--pp-size", topology.pp),
        ("--dcp-size", topology.dcp),
        ("--attn-cp-size", topology.attn_cp),
        ("--dp-size", parallel.dp_size),
        ("--ep-size", topology.moe_ep),
        ("--moe-dp-size", topology.moe_dp),
        ("--nnodes", topology.nnodes),
    ):
        if given != 1:
            raise ArgumentRefusal(f"{flag}: this version serves 1 only, given {given}")
    for flag, given, only in (
        ("--enable-dp-attention", parallel.enable_dp_attention, False),
        ("--moe-dense-tp-size", parallel.moe_dense_tp_size, None),
        ("--enable-eplb", moe.enable_eplb, False),
        ("--ep-num-redundant-experts", moe.ep_num_redundant_experts, 0),
        ("--init-expert-location", moe.init_expert_location, "trivial"),
        ("--ep-dispatch-algorithm", moe.ep_dispatch_algorithm, None),
    ):
        if given != only:
            raise ArgumentRefusal(f"{flag}: this version serves tensor parallel layouts only; leave it out")


def limit_threads() -> None:
    """Give this rank one compute thread, or what `$OMP_NUM_THREADS` says: ranks must not take each other's cores."""
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "1"))))


def destroy_groups() -> None:
    """Take the backend down, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def device_name() -> str:
    """Return the registry's name of this rank's device: `cpu-<index>`."""
    return f"{get_model().device}-{get_parallel().base_gpu_id + get_parallel().local_rank}"
