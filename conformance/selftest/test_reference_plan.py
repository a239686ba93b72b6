"""Plans and slabs: which checkpoint elements each rank holds, where they land, and what the layout hash depends on."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import conformance.vectors
from conformance.selftest import tiny
from reference.errors import CheckpointRefusal
from reference.models import build_model
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import bind, fill_slab, rope_table, slab_bytes, slab_view
from reference.weights.plan import ALIGNMENT, RankPlan, Source, TensorPlan, plan_rank, planned, whole

TP_SIZES = (1, 2, 4, 8)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[dict[str, Any], int]:
    """Draw a configuration and a TP size that it allows."""
    tp_size = draw(st.sampled_from(TP_SIZES))
    kv_heads = draw(st.sampled_from([1, 2, 4, 8, 16]))
    heads = max(kv_heads, tp_size) * draw(st.integers(1, 3))
    config: dict[str, Any] = {
        **draw(st.sampled_from([tiny.DENSE, tiny.SPARSE])),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": tp_size * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 200)),
        "tie_word_embeddings": draw(st.booleans()),
        "max_position_embeddings": draw(st.integers(1, 5)),
    }
    if "num_experts" in config:
        config["num_experts"] = draw(st.integers(1, 5))
        config["moe_intermediate_size"] = tp_size * draw(st.integers(1, 2))
    return config, tp_size


@contextmanager
def written(config: dict[str, Any], tensors: dict[str, torch.Tensor], shards: int = 1) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield tiny.write(Path(name), config, tensors, shards)


def fill(plan: RankPlan, directory: Path) -> dict[str, torch.Tensor]:
    """Fill a new slab and return its views by name."""
    slab = torch.zeros(slab_bytes(plan), dtype=torch.uint8)
    fill_slab(slab, plan, Checkpoint.open(directory), lambda done, total: None)
    return {tensor.name: slab_view(slab, tensor) for tensor in plan.tensors}


@settings(max_examples=60, deadline=None)
@given(layouts())
def test_ranks_together_cover_the_checkpoint_once_and_no_place_twice(layout: tuple[dict[str, Any], int]) -> None:
    """Each checkpoint element is on exactly one rank, or on one a replica: all of a norm's, the KV heads' past their number.

    Places that no source covers are padding of the vocabulary and nothing else.
    """
    config, tp_size = layout
    tensors = tiny.make_tensors(config)
    times = {name: np.zeros(tuple(tensor.shape), int) for name, tensor in tensors.items()}
    with written(config, tensors) as directory:
        for rank in range(tp_size):
            plan = tiny.plan(directory, tp_size, rank)
            check_places(plan)
            for tensor in plan.tensors:
                places = np.zeros(tensor.shape, int)
                for source in tensor.sources:
                    box = tuple(slice(a, b) for a, b in zip(source.start, source.stop, strict=True))
                    times[source.tensor][box] += 1
                    lead = source.at[: len(source.at) - len(source.start)]
                    inner = zip(source.at[len(lead) :], source.start, source.stop, strict=True)
                    places[(*lead, *(slice(at, at + b - a) for at, a, b in inner))] += 1
                if tensor.kind == "derived" or tensor.alias:
                    assert not tensor.sources
                elif tensor.name.endswith(("embed_tokens.weight", "lm_head.weight")):
                    rows = min(max(config["vocab_size"] - rank * tensor.shape[0], 0), tensor.shape[0])
                    assert (places[:rows] == 1).all()
                    assert not places[rows:].any()
                else:
                    assert (places == 1).all(), tensor.name
    replicas = max(1, tp_size // config["num_key_value_heads"])
    for name, count in times.items():
        shared = tp_size if "norm" in name or name.endswith("mlp.gate.weight") else 1
        expected = replicas if ".k_proj" in name or ".v_proj" in name else shared
        assert (count == expected).all(), name


def check_places(plan: RankPlan) -> None:
    """Offsets are aligned, tensors lie apart and inside the slab; an alias lies where its owner does."""
    by_name = {tensor.name: tensor for tensor in plan.tensors}
    assert list(by_name) == sorted(by_name)
    for tensor in plan.tensors:
        assert [source.at for source in tensor.sources] == sorted(source.at for source in tensor.sources)
    stop = 0
    for tensor in sorted((t for t in plan.tensors if not t.alias), key=lambda t: t.offset):
        assert tensor.offset % ALIGNMENT == 0
        assert tensor.offset >= stop
        stop = tensor.offset + tensor.nbytes
    assert stop <= plan.slab_size
    for tensor in plan.tensors:
        if tensor.alias:
            owner = by_name[tensor.alias]
            assert (tensor.offset, tensor.nbytes, tensor.shape) == (owner.offset, owner.nbytes, owner.shape)


def rank_rows(tensor: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
    return tensor.chunk(tp_size, 0)[rank]


def rank_columns(tensor: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
    return tensor.chunk(tp_size, 1)[rank]


def kv_rows(tensor: torch.Tensor, rank: int, tp_size: int, kv_heads: int) -> torch.Tensor:
    """Repeat each head for the ranks that have it in common, then split evenly."""
    heads = tensor.unflatten(0, (kv_heads, -1))
    return heads.repeat_interleave(max(1, tp_size // kv_heads), 0).chunk(tp_size, 0)[rank].flatten(0, 1)


def padded_rows(tensor: torch.Tensor, rank: int, tp_size: int) -> torch.Tensor:
    multiple = int(np.lcm(64, tp_size))
    padding = -tensor.shape[0] % multiple
    return rank_rows(torch.cat([tensor, tensor.new_zeros(padding, tensor.shape[1])]), rank, tp_size)


def expected_tensors(
    config: dict[str, Any], of: dict[str, torch.Tensor], rank: int, tp_size: int
) -> dict[str, torch.Tensor]:
    """Build a rank's tensors by cat, stack and chunk."""
    at = {"rank": rank, "tp_size": tp_size}
    built = {name: tensor for name, tensor in of.items() if "norm" in name or name.endswith("mlp.gate.weight")}
    built["model.embed_tokens.weight"] = padded_rows(of["model.embed_tokens.weight"], **at)
    head = "model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"
    built["lm_head.weight"] = padded_rows(of[head], **at)
    for layer in range(config["num_hidden_layers"]):
        p = f"model.layers.{layer}.self_attn"
        q = rank_rows(of[f"{p}.q_proj.weight"], **at)
        k, v = (kv_rows(of[f"{p}.{n}_proj.weight"], kv_heads=config["num_key_value_heads"], **at) for n in "kv")
        built[f"{p}.qkv_proj.weight"] = torch.cat([q, k, v])
        built[f"{p}.o_proj.weight"] = rank_columns(of[f"{p}.o_proj.weight"], **at)
        p = f"model.layers.{layer}.mlp"
        if not tiny.is_sparse(config, layer):
            gate_up = [rank_rows(of[f"{p}.{n}_proj.weight"], **at) for n in ("gate", "up")]
            built[f"{p}.gate_up_proj.weight"] = torch.cat(gate_up)
            built[f"{p}.down_proj.weight"] = rank_columns(of[f"{p}.down_proj.weight"], **at)
            continue
        experts = [f"{p}.experts.{e}" for e in range(config["num_experts"])]
        built[f"{p}.experts.w13_weight"] = torch.stack(
            [torch.cat([rank_rows(of[f"{e}.{n}_proj.weight"], **at) for n in ("gate", "up")]) for e in experts]
        )
        built[f"{p}.experts.w2_weight"] = torch.stack(
            [rank_columns(of[f"{e}.down_proj.weight"], **at) for e in experts]
        )
    return built


@settings(max_examples=25, deadline=None)
@given(layouts(), st.data())
def test_filled_slab_is_what_cat_and_stack_give(layout: tuple[dict[str, Any], int], data: st.DataObject) -> None:
    config, tp_size = layout
    rank = data.draw(st.integers(0, tp_size - 1))
    tensors = tiny.make_tensors(config)
    with written(config, tensors, data.draw(st.sampled_from([1, 3]))) as directory:
        filled = fill(tiny.plan(directory, tp_size, rank), directory)
    rope = filled.pop("model.rotary_emb.cos_sin_cache")
    expected = expected_tensors(config, tensors, rank, tp_size)
    assert filled.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(filled[name], tensor), name
    position = torch.arange(config["max_position_embeddings"]).double()
    d = config["head_dim"]
    angles = torch.stack([position * 1e6 ** (-2 * i / d) for i in range(d // 2)], 1)
    assert torch.equal(rope, torch.cat([angles.cos(), angles.sin()], 1).float())


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_casts_round_to_nearest_even_and_say_so(tmp_path: Path, stored: torch.dtype, dtype: str) -> None:
    tensors = tiny.make_tensors(tiny.DENSE, stored)
    # Halfway between two bfloat16 values: to the even one, up and down.
    tensors["model.norm.weight"][:2] = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8]).to(stored)
    directory = tiny.write(tmp_path, tiny.DENSE, tensors)
    plan = tiny.plan(directory, 2, 1, dtype)
    kept = str(stored) == f"torch.{dtype}"
    transform = {"op": "copy"} if kept else {"op": "cast", "from": str(stored)[6:]}
    assert {str(t.transform) for t in plan.tensors if t.sources} == {str(transform)}
    filled = fill(plan, directory)
    for name, tensor in expected_tensors(tiny.DENSE, tensors, 1, 2).items():
        assert torch.equal(filled[name], tensor.to(getattr(torch, dtype))), name
    if dtype == "bfloat16" and stored != torch.bfloat16:
        assert filled["model.norm.weight"][:2].tolist() == [1.0, 1.0 + 4 * 2**-8]


def test_layout_hash_differs_where_sources_do_and_only_there(tmp_path: Path) -> None:
    directory = tiny.write(tmp_path, tiny.SPARSE)
    hashes = [tiny.plan(directory, tp, rank).layout_hash for tp in (1, 2, 4) for rank in range(tp)]
    assert len(set(hashes)) == len(hashes)
    assert hashes[0].startswith("lh1:")
    assert len(hashes[0]) == 4 + 32
    # Equal bytes have equal keys, wherever they are: the same rank, planned again for another device.
    assert tiny.plan(directory, 4, 3).layout_hash == hashes[-1]


LAYOUTS = json.loads((Path(conformance.vectors.__file__).parent / "layout_hash.json").read_text())["cases"]


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case["name"])
def test_layout_hash_vectors(case: dict[str, Any]) -> None:
    """The same document in any language, the same hash."""
    tensors = []
    for tensor in sorted(case["tensors"], key=lambda tensor: tensor["name"]):
        slices = [{key: tuple(source[key]) for key in ("start", "stop", "at")} for source in tensor["sources"]]
        names = [source["tensor"] for source in tensor["sources"]]
        fields = {key: tensor[key] for key in ("name", "kind", "alias", "transform")}
        fields["sources"] = tuple(Source(name, (), **where) for name, where in zip(names, slices, strict=True))
        fields |= {"dtype": getattr(torch, tensor["dtype"]), "shape": tuple(tensor["shape"])}
        tensors.append(TensorPlan(**fields, offset=0, nbytes=0, stacked=False))
        assert list(tensors[-1].stride) == tensor["stride"]
    experts = {int(layer): tuple(slots) for layer, slots in case["experts"].items()}
    assert RankPlan(tuple(tensors), experts, 0).layout_hash == case["layout_hash"]


CONTENT = {
    "rope base": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "max position": {"max_position_embeddings": 31},
    "tied": {"tie_word_embeddings": True},
}
NO_CONTENT = {
    "norm epsilon": {"rms_norm_eps": 1e-5},
    "top k": {"num_experts_per_tok": 1},
    "rope base in the older spelling": {"rope_parameters": None, "rope_scaling": None, "rope_theta": 1_000_000},
}


@pytest.mark.parametrize("fields", [*CONTENT.values(), *NO_CONTENT.values()], ids=[*CONTENT, *NO_CONTENT])
def test_layout_hash_depends_on_what_the_bytes_depend_on(tmp_path: Path, fields: dict[str, Any]) -> None:
    tensors = tiny.make_tensors(tiny.SPARSE)
    before = tiny.plan(tiny.write(tmp_path / "a", tiny.SPARSE, tensors)).layout_hash
    after = tiny.plan(tiny.write(tmp_path / "elsewhere", tiny.SPARSE | fields, tensors, shards=4)).layout_hash
    assert (before != after) == (fields in CONTENT.values())


def test_layout_hash_depends_on_dtype_and_on_what_is_cast(tmp_path: Path) -> None:
    wide = tiny.write(tmp_path / "float32", tiny.DENSE, tiny.make_tensors(tiny.DENSE, torch.float32))
    narrow = tiny.write(tmp_path / "bfloat16", tiny.DENSE)
    hashes = [tiny.plan(d, dtype=t).layout_hash for d in (wide, narrow) for t in ("bfloat16", "float16", "float32")]
    assert len(set(hashes)) == 6
    assert tiny.plan(narrow, dtype="auto").layout_hash == hashes[3]


def test_tied_embeddings_are_one_tensor_of_two_names(tmp_path: Path) -> None:
    """The alias adds no bytes, names its owner, and binds to the same memory."""
    config = tiny.DENSE | {"tie_word_embeddings": True}
    directory = tiny.write(tmp_path, config)
    plan = tiny.plan(directory, 2, 1)
    alias, owner = (
        next(t for t in plan.tensors if t.name == n) for n in ("lm_head.weight", "model.embed_tokens.weight")
    )
    assert alias.structure() == owner.structure() | {
        "name": "lm_head.weight",
        "alias": "model.embed_tokens.weight",
        "transform": {"op": "alias"},
        "sources": [],
    }
    with tiny.rank(directory, 2, 1):
        model = build_model(Checkpoint.open(directory), "auto")
    slab = torch.zeros(slab_bytes(plan), dtype=torch.uint8)
    bind(model, plan, slab)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    start = slab.data_ptr()
    assert all(start <= p.data_ptr() < start + slab.numel() for p in model.parameters())
    assert not [name for name, p in model.named_parameters() if p.is_meta]


class Scaled(nn.Module):
    """A model with one tensor that is planned, and whatever a test gives it besides."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.weight = planned((16,), torch.bfloat16, whole("model.norm.weight", (16,)))
        for name, value in attributes.items():
            setattr(self, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", torch.ones(1)),
        ("bias", nn.Parameter(torch.ones(1))),
        ("scales", [torch.ones(1)]),
        ("nested", {"a": [(torch.ones(1),)]}),
        ("blocks", [nn.Linear(1, 1)]),
    ],
)
def test_tensor_that_nobody_planned_is_refused(tmp_path: Path, name: str, value: object) -> None:
    """As attribute, parameter, or hidden in a container: what a forward pass could read is planned, or it is an error."""
    checkpoint = Checkpoint.open(tiny.write(tmp_path, tiny.DENSE))
    plan_rank(Scaled(layers=3, names=("a", "b")), checkpoint)
    with pytest.raises(TypeError, match=name):
        plan_rank(Scaled(**{name: value}), checkpoint)


def test_buffer_that_nobody_planned_is_refused(tmp_path: Path) -> None:
    model = Scaled()
    model.register_buffer("scale", torch.ones(1), persistent=False)
    with pytest.raises(TypeError, match="scale"):
        plan_rank(model, Checkpoint.open(tiny.write(tmp_path, tiny.DENSE)))


def test_shard_that_changes_under_the_reader_is_refused(tmp_path: Path) -> None:
    """A slab of old and new bytes would pass every digest that is taken of it."""
    directory = tiny.write(tmp_path, tiny.DENSE)
    plan, checkpoint = tiny.plan(directory), Checkpoint.open(directory)

    def replace(done: int, total: int) -> None:
        tiny.write(directory / "new", tiny.DENSE, tiny.make_tensors(tiny.DENSE, seed=1))
        (directory / "new" / tiny.SINGLE).rename(directory / tiny.SINGLE)

    slab = torch.zeros(slab_bytes(plan), dtype=torch.uint8)
    once = iter([replace])
    with pytest.raises(CheckpointRefusal, match="changed while it was read"):
        fill_slab(slab, plan, checkpoint, lambda done, total: next(once, lambda *_: None)(done, total))


def test_rope_table_by_hand() -> None:
    table = rope_table({"op": "rope", "base": 100.0, "head_dim": 4, "max_position": 3})
    angle = 2 * 100.0 ** (-2 / 4)
    assert table.shape == (3, 4)
    assert table[2].tolist() == torch.tensor([np.cos(2.0), np.cos(angle), np.sin(2.0), np.sin(angle)]).float().tolist()
