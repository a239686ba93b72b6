"""The oracle against tensors put together with torch, and against checkpoints that are wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from matrix.cell import Layout
from matrix.checkpoint import Checkpoint, CheckpointError, read_checkpoint
from matrix.digest import digest
from matrix.dtype import cast
from matrix.oracle import RankExpectation, expected_ranks, rope_table

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "dtype": "float32",
    "vocab_size": 70,
    "hidden_size": 8,
    "intermediate_size": 12,
    "moe_intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 16,
    "rope_theta": 100.0,
    "num_local_experts": 3,
    "mlp_only_layers": [1],
    "tie_word_embeddings": False,
}
Tensors = dict[str, torch.Tensor]


def weights(dtype: torch.dtype = torch.float32) -> Tensors:
    """Return a checkpoint of `CONFIG`: layer 0 has experts, layer 1 is dense."""
    source = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (70, 8), "lm_head": (70, 8), "model.norm": (8,)}
    for layer in ("model.layers.0", "model.layers.1"):
        shapes |= {f"{layer}.input_layernorm": (8,), f"{layer}.post_attention_layernorm": (8,)}
        attention = {
            "q_proj": (16, 8),
            "k_proj": (8, 8),
            "v_proj": (8, 8),
            "o_proj": (8, 16),
            "q_norm": (4,),
            "k_norm": (4,),
        }
        shapes |= {f"{layer}.self_attn.{name}": shape for name, shape in attention.items()}
    mlps = {"model.layers.1.mlp": 12} | {f"model.layers.0.mlp.experts.{expert}": 6 for expert in range(3)}
    for prefix, inter in mlps.items():
        shapes |= {
            f"{prefix}.gate_proj": (inter, 8),
            f"{prefix}.up_proj": (inter, 8),
            f"{prefix}.down_proj": (8, inter),
        }
    shapes["model.layers.0.mlp.gate"] = (3, 8)
    return {f"{name}.weight": torch.randn(shape, generator=source).to(dtype) for name, shape in shapes.items()}


def write(directory: Path, tensors: Tensors, config: Mapping[str, Any] = CONFIG, shards: int = 1) -> Path:
    """Write a checkpoint with `safetensors`' own writer, a name in every `shards`-th to each shard."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if shards == 1:
        save_file(tensors, directory / "model.safetensors")
        return directory
    weight_map = {name: f"model-{index % shards}.safetensors" for index, name in enumerate(names)}
    for shard in set(weight_map.values()):
        save_file({name: tensors[name] for name in names if weight_map[name] == shard}, directory / shard)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def bits(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return (tensor.view(torch.int16) if tensor.element_size() == 2 else tensor.view(torch.int32)).numpy()


def by_torch(t: Tensors, tp: int, rank: int, dtype: torch.dtype) -> dict[str, list[str]]:
    """Return the digests of a rank's tensors of `CONFIG`, by SPEC.md section 1 in torch's own terms."""

    def part(tensor: torch.Tensor, axis: int = 0) -> torch.Tensor:
        return tensor.chunk(tp, axis)[rank]

    def kv(name: str) -> torch.Tensor:
        heads = t[name].view(2, 4, 8)
        return (part(heads) if tp <= 2 else heads[rank * 2 // tp : rank * 2 // tp + 1]).reshape(-1, 8)

    def gate_up(prefix: str) -> torch.Tensor:
        return torch.cat([part(t[f"{prefix}.gate_proj.weight"]), part(t[f"{prefix}.up_proj.weight"])])

    held: Tensors = {"model.norm.weight": t["model.norm.weight"]}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        held[name] = part(torch.nn.functional.pad(t[name], (0, 0, 0, 128 - 70)))
    for n in (0, 1):
        layer, attention = f"model.layers.{n}", f"model.layers.{n}.self_attn"
        same = [
            f"{layer}.input_layernorm",
            f"{layer}.post_attention_layernorm",
            f"{attention}.q_norm",
            f"{attention}.k_norm",
        ]
        held |= {f"{name}.weight": t[f"{name}.weight"] for name in same}
        q = part(t[f"{attention}.q_proj.weight"])
        held[f"{attention}.qkv_proj.weight"] = torch.cat([q, *(kv(f"{attention}.{x}_proj.weight") for x in "kv")])
        held[f"{attention}.o_proj.weight"] = part(t[f"{attention}.o_proj.weight"], 1)
    held["model.layers.1.mlp.gate_up_proj.weight"] = gate_up("model.layers.1.mlp")
    held["model.layers.1.mlp.down_proj.weight"] = part(t["model.layers.1.mlp.down_proj.weight"], 1)
    held["model.layers.0.mlp.gate.weight"] = t["model.layers.0.mlp.gate.weight"]
    digests = {name: [digest(bits(tensor.to(dtype)))] for name, tensor in held.items()}
    experts = [f"model.layers.0.mlp.experts.{expert}" for expert in range(3)]
    w13 = [gate_up(expert) for expert in experts]
    w2 = [part(t[f"{expert}.down_proj.weight"], 1) for expert in experts]
    digests["model.layers.0.mlp.experts.w13_weight"] = [digest(bits(slot.to(dtype))) for slot in w13]
    digests["model.layers.0.mlp.experts.w2_weight"] = [digest(bits(slot.to(dtype))) for slot in w2]
    return digests


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("launch", ["auto", "float32", "bfloat16", "float16"])
def test_digests_are_those_of_tensors_made_with_torch(tmp_path: Path, tp: int, stored: str, launch: str) -> None:
    tensors = weights(getattr(torch, stored))
    path = write(tmp_path, tensors, CONFIG | {"dtype": stored}, shards=3)
    dtype = getattr(torch, stored if launch == "auto" else launch)
    for rank, expectation in enumerate(expected_ranks(path, Layout(tp), launch)):
        rope = expectation.digests["model.rotary_emb.cos_sin_cache"]
        assert {**expectation.digests} == {**by_torch(tensors, tp, rank, dtype), "model.rotary_emb.cos_sin_cache": rope}
        assert expectation.rank == rank
        assert expectation.experts == {0: [0, 1, 2]}


def test_ranks_beyond_the_kv_heads_hold_the_same_head(tmp_path: Path) -> None:
    dense = CONFIG | {"num_local_experts": 3, "moe_intermediate_size": 8}
    tensors = weights()
    for name in [name for name in tensors if ".experts." in name]:
        shape = (8, 8)
        tensors[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
    ranks = expected_ranks(write(tmp_path, tensors, dense), Layout(4))
    for rank, expectation in enumerate(ranks):
        assert expectation.digests == by_torch(tensors, 4, rank, torch.float32) | {
            "model.rotary_emb.cos_sin_cache": expectation.digests["model.rotary_emb.cos_sin_cache"]
        }
    sources = [{t.name: t for t in rank.tensors}["model.layers.0.self_attn.qkv_proj.weight"].sources for rank in ranks]
    assert [found[1].start[0] for found in sources] == [0, 0, 4, 4]


def expectation(path: Path, tp: int = 1, dtype: str = "auto", rank: int = 0) -> RankExpectation:
    return expected_ranks(path, Layout(tp), dtype)[rank]


def test_structure_of_the_second_rank(tmp_path: Path) -> None:
    found = {
        tensor.name: tensor.structure() for tensor in expectation(write(tmp_path, weights()), 2, "bfloat16", 1).tensors
    }
    assert list(found) == sorted(found)
    embedding, norm = found["model.embed_tokens.weight"], found["model.norm.weight"]
    assert (embedding["shape"], embedding["stride"]) == ([64, 8], [8, 1])
    assert embedding["sources"] == [
        {"tensor": "model.embed_tokens.weight", "start": [64, 0], "stop": [70, 8], "at": [0, 0]}
    ]
    assert embedding["transform"] == {"op": "cast", "from": "float32"}
    assert norm["sources"] == [{"tensor": "model.norm.weight", "start": [0], "stop": [8], "at": [0]}]
    w2 = found["model.layers.0.mlp.experts.w2_weight"]
    assert (w2["shape"], w2["stride"], w2["dtype"]) == ([3, 8, 3], [24, 3, 1], "bfloat16")
    name = "model.layers.0.mlp.experts.2.down_proj.weight"
    assert w2["sources"][2] == {"tensor": name, "start": [0, 3], "stop": [8, 6], "at": [2, 0, 0]}
    rope = found["model.rotary_emb.cos_sin_cache"]
    assert rope["transform"] == {"op": "rope", "base": 100.0, "head_dim": 4, "max_position": 16}
    assert (rope["kind"], rope["dtype"], rope["sources"]) == ("derived", "float32", [])


def test_a_rank_past_the_vocabulary_holds_zeros(tmp_path: Path) -> None:
    tensors = weights()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = tensors[name][:20].clone()
    held = expectation(write(tmp_path, tensors, CONFIG | {"vocab_size": 20}), 2, rank=1)
    embedding = next(tensor for tensor in held.tensors if tensor.name == "model.embed_tokens.weight")
    assert embedding.sources == ()
    assert held.digests[embedding.name] == [digest(np.zeros((32, 8), np.float32))]


def test_tied_embeddings_are_an_alias_without_digest(tmp_path: Path) -> None:
    tied, untied = (
        write(tmp_path / str(tie), weights(), CONFIG | {"tie_word_embeddings": tie}) for tie in (True, False)
    )
    head = next(tensor for tensor in expectation(tied).tensors if tensor.name == "lm_head.weight")
    assert (head.alias, head.sources, head.transform, head.nbytes) == (
        "model.embed_tokens.weight",
        (),
        {"op": "alias"},
        0,
    )
    assert head.shape == (128, 8)
    assert expectation(tied).digests["lm_head.weight"] == []
    assert expectation(tied).layout_hash != expectation(untied).layout_hash
    assert expectation(tied).checkpoint == expectation(untied).checkpoint


def test_fingerprint_is_of_the_bytes_not_of_the_files(tmp_path: Path) -> None:
    one, three = write(tmp_path / "a", weights()), write(tmp_path / "b", weights(), shards=3)
    assert expectation(one).checkpoint == expectation(three).checkpoint
    assert expectation(one).key(1) == expectation(three).key(1) != expectation(one).key(2)
    changed = weights()
    changed["model.norm.weight"].view(torch.int32)[3] ^= 1
    other = expectation(write(tmp_path / "c", changed))
    assert other.layout_hash == expectation(one).layout_hash
    assert other.checkpoint != expectation(one).checkpoint
    assert other.key(1) != expectation(one).key(1)


def test_swapped_experts_show_in_digests_only(tmp_path: Path) -> None:
    tensors = weights()
    swapped = {name.replace(".experts.0.", ".experts.x."): tensor for name, tensor in tensors.items()}
    swapped = {name.replace(".experts.1.", ".experts.0."): tensor for name, tensor in swapped.items()}
    swapped = {name.replace(".experts.x.", ".experts.1."): tensor for name, tensor in swapped.items()}
    right, wrong = expectation(write(tmp_path / "a", tensors)), expectation(write(tmp_path / "b", swapped))
    w13 = "model.layers.0.mlp.experts.w13_weight"
    assert right.layout_hash == wrong.layout_hash
    assert right.digests[w13] == [wrong.digests[w13][slot] for slot in (1, 0, 2)] != wrong.digests[w13]


def test_every_rank_and_dtype_has_a_layout_hash_of_its_own(tmp_path: Path) -> None:
    path = write(tmp_path, weights())
    ranks = [
        rank for tp in (1, 2) for dtype in ("float32", "bfloat16") for rank in expected_ranks(path, Layout(tp), dtype)
    ]
    assert len({rank.layout_hash for rank in ranks}) == len(ranks) == 6


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=50))
def test_casts_equal_those_of_torch(patterns: list[int]) -> None:
    array = np.array(patterns, "<u4").view("<f4")
    array = array[~np.isnan(array)]
    tensor = torch.from_numpy(array.copy())
    narrow, half = tensor.to(torch.bfloat16), tensor.to(torch.float16)
    assert (cast(array, "float32", "bfloat16").view(np.int16) == bits(narrow)).all()
    assert (cast(array, "float32", "float16").view(np.int16) == bits(half)).all()
    stored = bits(narrow).view("<u2")
    assert (cast(stored, "bfloat16", "float32").view(np.int32) == bits(narrow.float())).all()
    assert (cast(stored, "bfloat16", "float16").view(np.int16) == bits(narrow.half())).all()


def test_ties_round_to_even_and_nan_stays_nan() -> None:
    ties = np.array([0x3F808000, 0x3F818000, 0x7F800001, 0x7F7FFFFF], "<u4").view("<f4")
    assert [hex(value) for value in cast(ties, "float32", "bfloat16")] == ["0x3f80", "0x3f82", "0x7fc0", "0x7f80"]


def test_rope_table_is_cosines_then_sines() -> None:
    table = rope_table(100.0, 6, 40)
    assert (table.shape, table.dtype) == ((40, 6), np.float32)
    for p in (0, 1, 39):
        angles = [p * 100.0 ** (-2 * i / 6) for i in range(3)]
        assert table[p].tolist() == [np.float32(f(angle)) for f in (math.cos, math.sin) for angle in angles]


def edit_header(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Rewrite a shard's header; the tensors' bytes stay."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_json(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def shorten(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


NORM = "model.norm.weight"
SHARD = "model-0.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json: No such file"),
        (lambda d: (d / "config.json").write_text("{"), "config.json: not JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "holds a JSON list, not an object"),
        (lambda d: edit_json(d / "config.json", dtype=None), "dtype is None, none of bfloat16, float16, float32; give"),
        (lambda d: (d / SHARD).unlink(), f"{SHARD}: No such file"),
        (lambda d: (d / INDEX).unlink(), "model.safetensors: No such file"),
        (lambda d: shorten(d / SHARD, 5), f"{SHARD}: its header of"),
        (lambda d: shorten(d / SHARD, 50), f"{SHARD}: its header of"),
        (lambda d: shorten(d / SHARD, (d / SHARD).stat().st_size - 1), "bytes, but its header describes"),
        (lambda d: (d / SHARD).open("ab").write(b"x"), "bytes, but its header describes"),
        (lambda d: (d / SHARD).write_bytes((2).to_bytes(8, "little") + b"{x"), f"{SHARD}: bad header"),
        (lambda d: edit_header(d / SHARD, lambda h: h.update(a=3)), f"{SHARD}: bad header"),
        (lambda d: edit_json(d / INDEX, weight_map={}), "has no weight_map"),
        (lambda d: edit_json(d / INDEX, weight_map={NORM: "../x"}), "shard '../x' is not the name of a file"),
        (lambda d: edit_json(d / INDEX, weight_map={NORM: SHARD}), "which the index puts in no shard"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    tmp_path: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(write(tmp_path, weights(), shards=2))
    with pytest.raises(CheckpointError) as raised:
        expected_ranks(tmp_path, Layout())
    assert message in str(raised.value)
    assert str(tmp_path) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h[NORM].update(data_offsets=[0, 32]), "do not fit float32"),
        (lambda h: h[NORM].update(shape=[9]), "do not fit float32 [9]"),
        (lambda h: h[NORM].update(shape=[2, 4]), "has shape [2, 4]; the configuration asks for [8]"),
        (lambda h: h[NORM].update(shape=[-8]), "shape [-8] is not a list of sizes"),
        (lambda h: h[NORM].update(dtype="I32"), "dtype 'I32' is none of BF16, F16, F32"),
        (lambda h: h.update(other=h.pop(NORM)), "tensor model.norm.weight is missing"),
    ],
)
def test_a_lying_header_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit_header(write(tmp_path, weights()) / "model.safetensors", change)
    with pytest.raises(CheckpointError) as raised:
        expected_ranks(tmp_path, Layout())
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_mixed_dtypes_in_one_tensor_are_refused(tmp_path: Path) -> None:
    tensors = weights()
    name = "model.layers.0.self_attn.k_proj.weight"
    tensors[name] = tensors[name].half()
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight would be made of float16 and float32"):
        expected_ranks(write(tmp_path, tensors), Layout())


def test_an_illegal_layout_and_an_unknown_dtype_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, weights())
    with pytest.raises(ValueError, match="tp3 is refused: tp-query-heads: tp 3 does not divide 4 query heads"):
        expected_ranks(path, Layout(3))
    with pytest.raises(ValueError, match="dtype 'int8' is none of auto, bfloat16"):
        expected_ranks(path, Layout(), "int8")


def test_reading_maps_the_stored_tensors(tmp_path: Path) -> None:
    tensors = weights(torch.bfloat16)
    checkpoint: Checkpoint = read_checkpoint(write(tmp_path, tensors, shards=3))
    assert checkpoint.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        stored = checkpoint.tensors[name]
        assert (stored.dtype, stored.shape, stored.nbytes) == ("bfloat16", tuple(tensor.shape), tensor.nbytes)
        assert (stored.map().view(np.int16) == bits(tensor)).all()
        assert not stored.map().flags.writeable
