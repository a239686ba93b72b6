"""What a rank will hold, decided before a byte is read: each tensor's sources, transform, place and shape.

A model is built on the meta device. Its modules attach a `Recipe` to every tensor they make; `plan_rank` walks the
model, checks the recipes against the checkpoint's headers, and lays the tensors out in one slab.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from reference.errors import CheckpointRefusal
from reference.weights.checkpoint import Checkpoint, dtype_name

FORMAT = 1
# Raised when the same plan would give other bytes.
POST_PROCESSING = 1
_STORED = (torch.bfloat16, torch.float16, torch.float32)
# Every tensor starts on this boundary: enough for vector loads and for the kernels' alignment-dependent choices.
ALIGNMENT = 256


@dataclass(frozen=True)
class Source:
    """A slice of a checkpoint tensor and where it lands.

    Elements `[start, stop)` of `tensor`, whose whole shape must be `of`, land with the first one at index `at`.
    """

    tensor: str
    of: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    at: tuple[int, ...]

    def has_elements(self) -> bool:
        """Say whether the slice is not empty."""
        return all(start < stop for start, stop in zip(self.start, self.stop, strict=True))


@dataclass(frozen=True)
class Recipe:
    """How a module's tensor is made. `derived` is a rope table's values, or None where checkpoint slices are copied."""

    sources: tuple[Source, ...] = ()
    derived: dict[str, Any] | None = None
    kind: str = "parameter"
    stacked: bool = False


@dataclass(frozen=True)
class TensorPlan:
    """One tensor of a rank. `offset` and `nbytes` are its place in the slab; an alias has its owner's."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: str
    alias: str | None
    transform: dict[str, Any]
    sources: tuple[Source, ...]
    offset: int
    nbytes: int
    stacked: bool

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides in elements: row-major, without gaps."""
        return tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))

    def structure(self) -> dict[str, Any]:
        """Return what the layout hash sees of this tensor."""
        return {
            "name": self.name,
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "stride": list(self.stride),
            "kind": self.kind,
            "alias": self.alias,
            "transform": self.transform,
            "sources": [
                {"tensor": s.tensor, "start": list(s.start), "stop": list(s.stop), "at": list(s.at)}
                for s in self.sources
            ],
        }


@dataclass(frozen=True)
class RankPlan:
    """Everything a rank holds, tensors sorted by name, and the logical experts in its slots by layer."""

    tensors: tuple[TensorPlan, ...]
    experts: dict[int, tuple[int, ...]]
    slab_size: int

    @cached_property
    def layout_hash(self) -> str:
        """`lh1:` + 32 hex digits over structure, source slices and expert slots. No byte is read for it."""
        document = {
            "format": FORMAT,
            "experts": {str(layer): list(slots) for layer, slots in self.experts.items()},
            "tensors": [tensor.structure() for tensor in self.tensors],
        }
        return "lh1:" + hash_canonical_json(document)


def hash_canonical_json(document: Any) -> str:
    """Return BLAKE2b-128, in hex, of a document as JSON with sorted keys and no spaces, in UTF-8."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def planned(shape: tuple[int, ...], dtype: torch.dtype, recipe: Recipe) -> nn.Parameter:
    """Return a meta tensor that says how it is made. Modules keep it as parameter, buffer or plain attribute."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)
    parameter.recipe = recipe  # type: ignore[attr-defined]
    return parameter


def whole(tensor: str, shape: tuple[int, ...]) -> Recipe:
    """Return the recipe of a tensor that every rank holds as the checkpoint has it."""
    zeros = (0,) * len(shape)
    return Recipe((Source(tensor, shape, zeros, shape, zeros),))


def reachable_tensors(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Yield name, owning module, attribute and tensor of everything a forward pass could read, aliases included."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        attributes = {k: v for k, v in vars(module).items() if k not in ("_parameters", "_buffers", "_modules")}
        for attribute, value in {**module._parameters, **module._buffers, **attributes}.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(value, torch.Tensor):
                yield name, module, attribute, value
            elif _hides_tensors(value):
                raise TypeError(f"{name}: tensors in a container can't be planned; give each its own attribute")


def _hides_tensors(value: Any) -> bool:
    if isinstance(value, dict):
        value = tuple(value.values())
    return isinstance(value, list | tuple | set | frozenset) and any(
        isinstance(item, torch.Tensor | nn.Module) or _hides_tensors(item) for item in value
    )


def plan_rank(model: nn.Module, checkpoint: Checkpoint) -> RankPlan:
    """Plan the tensors of a model that was built on the meta device for this rank.

    Raises `CheckpointRefusal` where the checkpoint lacks a source or has it in another shape or kind of dtype.
    """
    # The first name in module order owns the memory; later names of the same tensor are its aliases.
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, _, _, tensor in reachable_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    plans: list[TensorPlan] = []
    offset = 0
    for (owner, *aliases), tensor in sorted(
        zip(names.values(), tensors.values(), strict=True), key=lambda pair: pair[0]
    ):
        recipe: Recipe | None = getattr(tensor, "recipe", None)
        if recipe is None:
            raise TypeError(f"{owner}: a tensor that is reachable from the model has no recipe")
        transform = recipe.derived or _check_sources(owner, tensor.dtype, recipe.sources, checkpoint)
        plan = TensorPlan(
            name=owner,
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            kind=recipe.kind,
            alias=None,
            transform=transform,
            sources=tuple(sorted(filter(Source.has_elements, recipe.sources), key=lambda source: source.at)),
            offset=offset,
            nbytes=tensor.numel() * tensor.itemsize,
            stacked=recipe.stacked,
        )
        plans.append(plan)
        plans += (replace(plan, name=name, alias=owner, transform={"op": "alias"}, sources=()) for name in aliases)
        offset += -(-plan.nbytes // ALIGNMENT) * ALIGNMENT
    experts = {
        layer: slots for module in model.modules() for layer, slots in getattr(module, "expert_slots", {}).items()
    }
    return RankPlan(tuple(sorted(plans, key=lambda plan: plan.name)), dict(sorted(experts.items())), offset)


def _check_sources(
    name: str, dtype: torch.dtype, sources: tuple[Source, ...], checkpoint: Checkpoint
) -> dict[str, Any]:
    found: set[torch.dtype] = set()
    for source in sources:
        entry = checkpoint.entry(source.tensor)
        where = checkpoint.shard_of[source.tensor].path
        if entry.shape != source.of:
            raise CheckpointRefusal(
                f"{where}: tensor {source.tensor} has shape {list(entry.shape)}, config.json asks for {list(source.of)}"
            )
        if entry.dtype not in _STORED:
            raise CheckpointRefusal(
                f"{where}: tensor {source.tensor} has dtype {dtype_name(entry.dtype)}, {name} is"
                " made of bfloat16, float16 or float32"
            )
        found.add(entry.dtype)
    if len(found) > 1:
        names = ", ".join(sorted(map(dtype_name, found)))
        raise CheckpointRefusal(
            f"{checkpoint.path}: tensors fused into {name} differ in dtype ({names}); they must have one"
        )
    stored = found.pop() if found else dtype
    return {"op": "copy"} if stored == dtype else {"op": "cast", "from": dtype_name(stored)}
