"""The manifest: what a daemon holds for a rank, tensor by tensor, digests included."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from reference.cache.digest import digest_slots
from reference.errors import CacheRefusal
from reference.weights.checkpoint import dtype_name
from reference.weights.fill import slab_view
from reference.weights.plan import FORMAT, RankPlan


class ManifestTensor(msgspec.Struct, frozen=True):
    """One tensor: structure as in the layout hash, place in the slab in bytes, digests (one, or one a slot)."""

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int
    nbytes: int
    kind: str
    alias: str | None
    transform: dict[str, Any]
    sources: list[dict[str, Any]]
    digests: list[str]


class Manifest(msgspec.Struct, frozen=True):
    """All that a daemon holds for one rank. `experts` maps a layer to the logical expert in each slot."""

    format: int
    key: str
    layout_hash: str
    checkpoint: str
    epoch: int
    slab_size: int
    experts: dict[str, list[int]]
    tensors: list[ManifestTensor]


def make_manifest(plan: RankPlan, slab: torch.Tensor, key: str, checkpoint: str) -> Manifest:
    """Digest a filled slab (`[slab_size]`, uint8) and describe it."""
    tensors = [
        ManifestTensor(
            **tensor.structure(),
            offset=tensor.offset,
            nbytes=tensor.nbytes,
            digests=[] if tensor.alias else digest_slots(slab_view(slab, tensor), tensor.stacked),
        )
        for tensor in plan.tensors
    ]
    experts = {str(layer): list(slots) for layer, slots in plan.experts.items()}
    return Manifest(FORMAT, key, plan.layout_hash, checkpoint, 0, plan.slab_size, experts, tensors)


def check_against_plan(manifest: Manifest, plan: RankPlan, key: str, checkpoint: str) -> None:
    """Compare a daemon's manifest with this rank's own plan, key and fingerprint, place in the slab included.

    Raises `CacheRefusal` (`protocol`): equal keys with another structure mean that one side is wrong.
    """
    difference = first_difference(manifest, plan)
    if manifest.format != FORMAT:
        difference = f"manifest format {manifest.format}, this engine reads {FORMAT}"
    for what, theirs, ours in (
        ("key", manifest.key, key),
        ("layout hash", manifest.layout_hash, plan.layout_hash),
        ("checkpoint", manifest.checkpoint, checkpoint),
    ):
        if difference is None and theirs != ours:
            difference = f"{what} {_short(theirs)}, this engine's is {ours}"
    if difference is None and manifest.slab_size != plan.slab_size:
        difference = f"slab of {manifest.slab_size} bytes, planned {plan.slab_size}"
    if difference is None:
        places = {tensor.name: (tensor.offset, tensor.nbytes) for tensor in plan.tensors}
        moved = [tensor.name for tensor in manifest.tensors if (tensor.offset, tensor.nbytes) != places[tensor.name]]
        difference = f"{moved[0]} lies elsewhere in the slab" if moved else None
    if difference:
        raise CacheRefusal(
            "protocol", f"daemon's manifest does not match its own key: {difference}; restart the daemon"
        )


def first_difference(manifest: Manifest, plan: RankPlan) -> str | None:
    """Say in words where a daemon's tensors part from a plan, or None where they don't."""
    held = {tensor.name: tensor for tensor in manifest.tensors}
    wanted = {tensor.name: tensor for tensor in plan.tensors}
    for name in sorted(held.keys() ^ wanted.keys()):
        return f"tensor {name} is only on the {'daemon' if name in held else 'engine'}'s side"
    slots = {str(layer): list(experts) for layer, experts in plan.experts.items()}
    for layer in sorted(manifest.experts.keys() | slots.keys(), key=lambda layer: (len(layer), layer)):
        theirs, ours = manifest.experts.get(layer, []), slots.get(layer, [])
        if len(theirs) != len(ours):
            return f"layer {layer} has {len(theirs)} expert slots in the daemon, {len(ours)} in the engine"
        for slot, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            if a != b:
                return f"layer {layer} slot {slot} holds logical expert {a} in the daemon, {b} in the engine"
    for name, tensor in wanted.items():
        theirs_, ours_ = msgspec.to_builtins(held[name]), tensor.structure()
        for field, value in ours_.items():
            if theirs_[field] != value:
                return (
                    f"tensor {name}: {field} is {_short(theirs_[field])} in the daemon, {_short(value)} in the engine"
                )
    return None


def verify_slab(manifest: Manifest, plan: RankPlan, slab: torch.Tensor) -> None:
    """Digest every mapped tensor and compare. Raises `CacheRefusal` (`digest_mismatch`) naming tensor and slot."""
    expected = {tensor.name: tensor.digests for tensor in manifest.tensors}
    for tensor in plan.tensors:
        if tensor.alias:
            continue
        found = digest_slots(slab_view(slab, tensor), tensor.stacked)
        if found != expected[tensor.name]:
            pairs = zip(found, expected[tensor.name], strict=False)
            slot = next((i for i, (a, b) in enumerate(pairs) if a != b), 0)
            where = f"{tensor.name} slot {slot}" if tensor.stacked else tensor.name
            raise CacheRefusal(
                "digest_mismatch",
                f"{where} ({dtype_name(tensor.dtype)} {list(tensor.shape)}): the mapped bytes are not those that the daemon"
                " digested; restart the daemon",
            )


def encode(manifest: Manifest) -> bytes:
    """Return the manifest as it travels: msgpack."""
    return msgspec.msgpack.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Read a manifest. Raises `CacheRefusal` (`protocol`) where it does not follow the schema."""
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise CacheRefusal("protocol", f"daemon's manifest can't be read ({error}); is it another version?") from None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
