"""What each rank must hold, derived from the checkpoint and the layout alone: structure, layout hash and digests.

Written from `conformance/SPEC.md` sections 1 to 4 and sharing no code with any target, so that a mistake must be made twice
to pass. Clear before quick: a tensor at a time is put together in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from matrix.cell import Cell, Layout
from matrix.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from matrix.digest import cache_key, digest, layout_hash
from matrix.dtype import STORAGE, Array, cast
from matrix.model_shape import ModelShape
from matrix.rules import decide

__all__ = ["ManifestTensor", "RankExpectation", "Source", "expected_ranks", "plan_rank", "read_checkpoint"]

DTYPES = tuple(STORAGE)
#: Vocabularies are padded to a multiple of this and of the tensor-parallel size.
VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class Source:
    """A box of a checkpoint tensor and where it lands: elements `[start, stop)` of `tensor`, the first at index `at`."""

    tensor: str
    start: tuple[int, ...]
    stop: tuple[int, ...]
    at: tuple[int, ...]


@dataclass(frozen=True)
class ManifestTensor:
    """A tensor of a rank. Sizes in elements; the fields are those of a layout hash's `tensors`.

    `stacked`: the first dimension is expert slots, and each has a digest of its own.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    transform: Mapping[str, Any]
    sources: tuple[Source, ...] = ()
    alias: str | None = None
    stacked: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies: none of its own for an alias."""
        return 0 if self.alias else math.prod(self.shape) * STORAGE[self.dtype].itemsize

    @property
    def stride(self) -> tuple[int, ...]:
        return tuple(math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    def structure(self) -> dict[str, Any]:
        """Return what the layout hash is made of."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "stride": list(self.stride),
            "kind": self.kind,
            "alias": self.alias,
            "transform": dict(self.transform),
            "sources": [
                {"tensor": s.tensor, "start": list(s.start), "stop": list(s.stop), "at": list(s.at)}
                for s in self.sources
            ],
        }


@dataclass(frozen=True)
class RankExpectation:
    """What one rank must hold.

    `digests`: by tensor, one, or one a slot for stacked experts; none for an alias. `experts`: the logical expert in each
    local slot, by layer. `checkpoint`: the fingerprint.
    """

    rank: int
    tensors: tuple[ManifestTensor, ...]
    experts: Mapping[int, Sequence[int]]
    layout_hash: str
    digests: Mapping[str, list[str]]
    checkpoint: str

    def key(self, post_processing: int) -> str:
        """Return the key of a target whose post-processing version this is."""
        return cache_key(self.checkpoint, self.layout_hash, post_processing)


def expected_ranks(checkpoint_dir: str | Path, layout: Layout, dtype: str = "auto") -> list[RankExpectation]:
    """Return what each rank must hold, in rank order. Reads every byte of the checkpoint.

    `dtype` is the launch `--dtype`. Raises `CheckpointError`; `ConfigError` for an unknown family; ValueError for a layout
    that is refused, or a dtype that isn't known.
    """
    checkpoint = read_checkpoint(checkpoint_dir)
    shape = ModelShape.from_config(checkpoint.config, str(checkpoint.path / "config.json"))
    dtype = _launch_dtype(checkpoint, dtype)
    expectations = []
    for rank in range(layout.world_size):
        tensors, experts = plan_rank(checkpoint, shape, layout, rank, dtype)
        expectations.append(
            RankExpectation(
                rank=rank,
                tensors=tensors,
                experts=experts,
                layout_hash=layout_hash([tensor.structure() for tensor in tensors], experts),
                digests={tensor.name: _digests(checkpoint, tensor) for tensor in tensors},
                checkpoint=checkpoint.fingerprint,
            )
        )
    return expectations


def plan_rank(
    checkpoint: Checkpoint, shape: ModelShape, layout: Layout, rank: int, dtype: str
) -> tuple[tuple[ManifestTensor, ...], dict[int, list[int]]]:
    """Return a rank's tensors, sorted by name, and its expert slots by layer. Reads no tensor's bytes.

    Raises ValueError for a layout that is refused, `CheckpointError` for a tensor that is missing or has another shape.
    """
    if violations := decide(shape, Cell(shape.architecture, layout, "off", "private")):
        raise ValueError(f"{checkpoint.path}: {layout.short} is refused: {'; '.join(map(str, violations))}")
    plan = _Plan(checkpoint, dtype)
    _plan_ends(plan, shape, layout.tp, rank)
    experts: dict[int, list[int]] = {}
    for layer in range(shape.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        _plan_attention(plan, shape, layout.tp, rank, prefix)
        if layer in shape.moe_layers:
            experts[layer] = list(range(shape.num_experts))
            _plan_experts(plan, shape, layout.tp, rank, prefix, experts[layer])
        else:
            _plan_mlp(plan, shape, layout.tp, rank, prefix)
    return tuple(sorted(plan.tensors, key=lambda tensor: tensor.name)), experts


@dataclass(frozen=True)
class _Box:
    """A part of a checkpoint tensor of shape `full`: rows or columns `[start, stop)`, placed at index `at`."""

    tensor: str
    full: tuple[int, ...]
    at: tuple[int, ...]
    axis: int = 0
    start: int = 0
    stop: int | None = None


@dataclass
class _Plan:
    """A rank's tensors while they are collected."""

    checkpoint: Checkpoint
    dtype: str
    tensors: list[ManifestTensor] = field(default_factory=list)

    def add(self, name: str, shape: tuple[int, ...], boxes: Sequence[_Box], stacked: bool = False) -> None:
        """Add a parameter made of parts of checkpoint tensors, in ascending order of `at`; they must have one dtype."""
        stored = {self._dtype(box) for box in boxes}
        if len(stored) > 1:
            raise CheckpointError(f"{self.checkpoint.path}: {name} would be made of {' and '.join(sorted(stored))}")
        cast_from = next(iter(stored))
        transform = {"op": "copy"} if cast_from == self.dtype else {"op": "cast", "from": cast_from}
        sources = [_source(box) for box in boxes if box.stop is None or box.start < box.stop]
        self.tensors.append(
            ManifestTensor(name, self.dtype, shape, "parameter", transform, tuple(sources), stacked=stacked)
        )

    def copy(self, name: str, *shape: int) -> None:
        """Add a parameter that is a whole checkpoint tensor of the same name."""
        self.add(name, shape, [_Box(name, shape, (0,) * len(shape))])

    def _dtype(self, box: _Box) -> str:
        stored = self.checkpoint.tensors.get(box.tensor)
        if stored is None:
            raise CheckpointError(f"{self.checkpoint.path}: tensor {box.tensor} is missing")
        if stored.shape != box.full:
            raise CheckpointError(
                f"{stored.file}: {box.tensor} has shape {list(stored.shape)}; the configuration asks for {list(box.full)}"
            )
        return stored.dtype


def _plan_ends(plan: _Plan, shape: ModelShape, tp: int, rank: int) -> None:
    """Embeddings, final norm, output head and rope table."""
    multiple = math.lcm(VOCAB_MULTIPLE, tp)
    rows = -(-shape.vocab_size // multiple) * multiple // tp
    full = (shape.vocab_size, shape.hidden_size)
    first, last = rank * rows, min((rank + 1) * rows, shape.vocab_size)
    local = (rows, shape.hidden_size)
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    plan.add(embedding, local, [_Box(embedding, full, (0, 0), 0, first, last)])
    if shape.tie_word_embeddings:
        plan.tensors.append(ManifestTensor(head, plan.dtype, local, "parameter", {"op": "alias"}, alias=embedding))
    else:
        plan.add(head, local, [_Box(head, full, (0, 0), 0, first, last)])
    plan.copy("model.norm.weight", shape.hidden_size)
    rope = {
        "op": "rope",
        "base": shape.rope_base,
        "head_dim": shape.head_dim,
        "max_position": shape.max_position_embeddings,
    }
    table = (shape.max_position_embeddings, shape.head_dim)
    plan.tensors.append(ManifestTensor("model.rotary_emb.cos_sin_cache", "float32", table, "derived", rope))


def _plan_attention(plan: _Plan, shape: ModelShape, tp: int, rank: int, prefix: str) -> None:
    """Norms and attention of one layer: query heads are split, KV heads are split or replicated."""
    hidden, head = shape.hidden_size, shape.head_dim
    for norm in ("input_layernorm", "post_attention_layernorm"):
        plan.copy(f"{prefix}.{norm}.weight", hidden)
    for norm in ("q_norm", "k_norm"):
        plan.copy(f"{prefix}.self_attn.{norm}.weight", head)
    query = shape.num_attention_heads // tp * head
    kv = max(1, shape.num_key_value_heads // tp) * head
    kv_start = rank * shape.num_key_value_heads // tp * head
    boxes, row = [], 0
    for name, heads, start, rows in (
        ("q_proj", shape.num_attention_heads, rank * query, query),
        ("k_proj", shape.num_key_value_heads, kv_start, kv),
        ("v_proj", shape.num_key_value_heads, kv_start, kv),
    ):
        full = (heads * head, hidden)
        boxes.append(_Box(f"{prefix}.self_attn.{name}.weight", full, (row, 0), 0, start, start + rows))
        row += rows
    plan.add(f"{prefix}.self_attn.qkv_proj.weight", (row, hidden), boxes)
    name, full = f"{prefix}.self_attn.o_proj.weight", (hidden, shape.num_attention_heads * head)
    plan.add(name, (hidden, query), [_Box(name, full, (0, 0), 1, rank * query, (rank + 1) * query)])


def _plan_mlp(plan: _Plan, shape: ModelShape, tp: int, rank: int, prefix: str) -> None:
    """The feed-forward part of a dense layer."""
    hidden, size = shape.hidden_size, shape.intermediate_size // tp
    boxes = _gate_up(f"{prefix}.mlp", shape.intermediate_size, hidden, size, rank, ())
    plan.add(f"{prefix}.mlp.gate_up_proj.weight", (2 * size, hidden), boxes)
    name, full = f"{prefix}.mlp.down_proj.weight", (hidden, shape.intermediate_size)
    plan.add(name, (hidden, size), [_Box(name, full, (0, 0), 1, rank * size, (rank + 1) * size)])


def _plan_experts(plan: _Plan, shape: ModelShape, tp: int, rank: int, prefix: str, slots: list[int]) -> None:
    """The router and the stacked experts of a MoE layer; `slots[s]` is the logical expert in slot `s`."""
    hidden, size = shape.hidden_size, shape.moe_intermediate_size // tp
    plan.copy(f"{prefix}.mlp.gate.weight", shape.num_experts, hidden)
    w13, w2 = [], []
    for slot, expert in enumerate(slots):
        name = f"{prefix}.mlp.experts.{expert}"
        w13 += _gate_up(name, shape.moe_intermediate_size, hidden, size, rank, (slot,))
        full = (hidden, shape.moe_intermediate_size)
        w2.append(_Box(f"{name}.down_proj.weight", full, (slot, 0, 0), 1, rank * size, (rank + 1) * size))
    plan.add(f"{prefix}.mlp.experts.w13_weight", (len(slots), 2 * size, hidden), w13, stacked=True)
    plan.add(f"{prefix}.mlp.experts.w2_weight", (len(slots), hidden, size), w2, stacked=True)


def _gate_up(prefix: str, inter: int, hidden: int, size: int, rank: int, slot: tuple[int, ...]) -> list[_Box]:
    """This rank's rows of `gate_proj`, then of `up_proj`."""
    return [
        _Box(f"{prefix}.{name}.weight", (inter, hidden), (*slot, row, 0), 0, rank * size, (rank + 1) * size)
        for name, row in (("gate_proj", 0), ("up_proj", size))
    ]


def _source(box: _Box) -> Source:
    start, stop = [0] * len(box.full), list(box.full)
    if box.stop is not None:
        start[box.axis], stop[box.axis] = box.start, box.stop
    return Source(box.tensor, tuple(start), tuple(stop), box.at)


def _launch_dtype(checkpoint: Checkpoint, dtype: str) -> str:
    """Return the type that weights are given: `auto` is what the configuration says."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise ValueError(f"dtype {dtype!r} is none of auto, {', '.join(DTYPES)}")
        return dtype
    where = checkpoint.path / "config.json"
    stated = checkpoint.config.get("dtype") or checkpoint.config.get("torch_dtype")
    if stated not in DTYPES:
        raise CheckpointError(f"{where}: dtype is {stated!r}, none of {', '.join(DTYPES)}; give the dtype to use")
    return str(stated)


def _digests(checkpoint: Checkpoint, tensor: ManifestTensor) -> list[str]:
    if tensor.alias:
        return []
    array = _fill(checkpoint, tensor)
    return [digest(slot) for slot in array] if tensor.stacked else [digest(array)]


def _fill(checkpoint: Checkpoint, tensor: ManifestTensor) -> Array:
    """Return a tensor's elements, in the storage of `matrix.dtype`."""
    if tensor.transform["op"] == "rope":
        return rope_table(tensor.transform["base"], tensor.transform["head_dim"], tensor.transform["max_position"])
    array = np.zeros(tensor.shape, STORAGE[tensor.dtype])
    for source in tensor.sources:
        stored = checkpoint.tensors[source.tensor]
        part = stored.map()[tuple(slice(start, stop) for start, stop in zip(source.start, source.stop, strict=True))]
        leading = len(source.at) - part.ndim
        box: list[int | slice] = [*source.at[:leading]]
        box += [slice(at, at + size) for at, size in zip(source.at[leading:], part.shape, strict=True)]
        array[tuple(box)] = cast(part, stored.dtype, tensor.dtype)
    return array


def rope_table(base: float, head_dim: int, max_position: int) -> Array:
    """Return cosines, then sines, `[max_position, head_dim]`, float32, from angles in float64."""
    frequencies = np.array([math.pow(base, -2 * i / head_dim) for i in range(head_dim // 2)])
    angles = np.arange(max_position)[:, None] * frequencies[None, :]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
