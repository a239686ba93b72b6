"""Fill a slab from memory-mapped shards, and put a model's tensors onto it.

Each source slice is copied once, from the page cache to its final place: sharding, fusing and stacking are where it
lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from reference.weights.checkpoint import Checkpoint
from reference.weights.plan import RankPlan, Source, TensorPlan, reachable_tensors


def slab_view(slab: torch.Tensor, plan: TensorPlan) -> torch.Tensor:
    """Return the planned tensor as a view of the slab (`[slab_size]`, uint8)."""
    return slab[plan.offset : plan.offset + plan.nbytes].view(plan.dtype).view(plan.shape)


def fill_slab(slab: torch.Tensor, plan: RankPlan, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
    """Write every planned tensor into a zeroed slab. `progress` gets bytes written so far and in all.

    Raises `CheckpointRefusal` where a shard changed since it was opened.
    """
    copies = [(source, tensor) for tensor in plan.tensors for source in tensor.sources]
    derived = [tensor for tensor in plan.tensors if tensor.transform["op"] == "rope"]
    total = sum(tensor.nbytes for tensor in plan.tensors if tensor.alias is None)
    written = 0
    for tensor in derived:
        slab_view(slab, tensor).copy_(rope_table(tensor.transform))
        written += tensor.nbytes
    # In the order of the files, so that a cold disk is read front to back.
    position = {shard: i for i, shard in enumerate(checkpoint.shards)}
    copies.sort(
        key=lambda c: (position[checkpoint.shard_of[c[0].tensor]], checkpoint.entry(c[0].tensor).start, c[0].start)
    )
    for source, tensor in copies:
        target = _destination(slab_view(slab, tensor), source)
        target.copy_(checkpoint.view(source.tensor)[_slices(source.start, source.stop)])
        written += target.numel() * target.itemsize
        progress(min(written, total - 1), total)
    checkpoint.check_unchanged()
    # Padding and duplicates make the sum of copies differ from the slab; the end is said once, here.
    progress(total, total)


def bind(model: nn.Module, plan: RankPlan, slab: torch.Tensor) -> None:
    """Put views of the slab in place of the model's meta tensors; names that share memory share one tensor."""
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    bound: dict[str, nn.Parameter] = {}
    for name, module, attribute, _ in list(reachable_tensors(model)):
        tensor = by_name[name]
        owner = tensor.alias or tensor.name
        if owner not in bound:
            bound[owner] = nn.Parameter(slab_view(slab, tensor), requires_grad=False)
        setattr(module, attribute, bound[owner])


def rope_table(transform: dict[str, Any]) -> torch.Tensor:
    """Return cosines, then sines, of position times inverse frequency. `[max_position, head_dim]`, float32.

    Computed in float64, so that every implementation rounds to the same table. Source: RoFormer (arXiv 2104.09864).
    """
    half = transform["head_dim"] // 2
    inverse = torch.tensor(
        [transform["base"] ** (-2 * i / transform["head_dim"]) for i in range(half)], dtype=torch.float64
    )
    angle = torch.arange(transform["max_position"], dtype=torch.float64)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], dim=1).float()


def _destination(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    size = [stop - start for start, stop in zip(source.start, source.stop, strict=True)]
    lead = len(source.at) - len(size)
    inner = tensor[source.at[:lead]] if lead else tensor
    return inner[_slices(source.at[lead:], tuple(a + n for a, n in zip(source.at[lead:], size, strict=True)))]


def _slices(start: tuple[int, ...], stop: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(a, b) for a, b in zip(start, stop, strict=True))


def slab_bytes(plan: RankPlan) -> int:
    """Return the size of the slab to allocate: the plan's, and at least one byte."""
    return max(1, plan.slab_size)
