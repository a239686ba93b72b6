"""How a rank comes by its weights: from the disk into a slab of its own, or from a daemon's."""

from __future__ import annotations

import socket
import sys
from dataclasses import dataclass

import torch

from reference.cache import client
from reference.cache.digest import digest_slots
from reference.cache.manifest import verify_slab
from reference.cache.transport import shm
from reference.cache.transport.base import Slab
from reference.context import get_cache
from reference.errors import CacheRefusal
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import fill_slab, slab_bytes, slab_view
from reference.weights.plan import RankPlan


@dataclass(frozen=True)
class Weights:
    """A rank's filled slab and where it came from, as `/server_info` shows it; nulls where nobody had to agree."""

    slab: Slab
    source: str
    digests: dict[str, list[str]]
    digest_state: str
    transport: str = "private"
    key: str | None = None
    checkpoint: str | None = None
    checkpoint_verified: str | None = None
    epoch: int = 0
    lease: socket.socket | None = None
    daemon_pid: int | None = None


def acquire_weights(plan: RankPlan, checkpoint: Checkpoint, device: str, rank: int) -> Weights:
    """Get the planned bytes as `--weight-cache-mode` and `--weight-cache-fallback` say.

    Raises `CacheRefusal` where there is no daemon with these bytes and the disk may not stand in.
    """
    if get_cache().weight_cache_mode == "off":
        return _from_disk(plan, checkpoint)
    try:
        return _from_daemon(plan, checkpoint, device, rank)
    except CacheRefusal as error:
        may_read = get_cache().weight_cache_mode == "client" and get_cache().weight_cache_fallback == "disk"
        if not may_read or error.code not in ("no_daemon", "key_mismatch"):
            raise
        print(f"warning: rank {rank} reads the disk instead of the weight cache: {error}", file=sys.stderr, flush=True)
        return _from_disk(plan, checkpoint)


def _from_disk(plan: RankPlan, checkpoint: Checkpoint) -> Weights:
    # The same slab as a daemon's, filled by the same code: addresses align alike, so kernels choose alike.
    slab = shm.allocate(slab_bytes(plan))
    fill_slab(slab.writable(), plan, checkpoint, lambda done, total: None)
    slab.seal()
    return Weights(slab, "disk", slab_digests(plan, slab.tensor()), "computed")


def _from_daemon(plan: RankPlan, checkpoint: Checkpoint, device: str, rank: int) -> Weights:
    attachment = client.attach(plan, checkpoint, device, rank)
    state = "skipped"
    if get_cache().weight_cache_verify == "full":
        try:
            verify_slab(attachment.manifest, plan, attachment.slab.tensor())
        except BaseException:
            attachment.lease.close()
            attachment.slab.close()
            raise
        state = "verified"
    return Weights(
        slab=attachment.slab,
        source="cache",
        digests={t.name: t.digests for t in attachment.manifest.tensors if not t.alias},
        digest_state=state,
        transport=attachment.transport,
        key=attachment.key,
        checkpoint=attachment.checkpoint,
        checkpoint_verified=attachment.checkpoint_verified,
        epoch=attachment.manifest.epoch,
        lease=attachment.lease,
        daemon_pid=attachment.daemon_pid,
    )


def slab_digests(plan: RankPlan, slab: torch.Tensor) -> dict[str, list[str]]:
    """Return the digests of every tensor that has memory of its own, by name: one, or one a slot of stacked experts."""
    return {t.name: digest_slots(slab_view(slab, t), t.stacked) for t in plan.tensors if t.alias is None}
