"""Checkpoints that are damaged or lie: each is refused by one line that says what and where, and none is believed."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.selftest import tiny
from reference.errors import ArgumentRefusal, CheckpointRefusal, Refusal
from reference.weights.checkpoint import Checkpoint

NORM = "model.norm.weight"
Damage = Callable[[Path], object]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.write(tmp_path / "model", tiny.DENSE, shards=3)


def refusal(directory: Path, tp_size: int = 1, dtype: str = "auto") -> str:
    """Open and plan a checkpoint that must be refused; return the one line that says why."""
    with pytest.raises(Refusal) as caught:
        tiny.plan(directory, tp_size, dtype=dtype)
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    return message


def check_refused(directory: Path, *words: str) -> None:
    message = refusal(directory)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("config", [tiny.DENSE, tiny.DENSE | {"tie_word_embeddings": True}, tiny.SPARSE])
@pytest.mark.parametrize("shards", [1, 4])
def test_a_true_checkpoint_reads_as_it_was_written(tmp_path: Path, config: dict[str, object], shards: int) -> None:
    tensors = tiny.make_tensors(config)
    checkpoint = Checkpoint.open(tiny.write(tmp_path, config, tensors, shards))
    assert checkpoint.shard_of.keys() == tensors.keys()
    assert len(checkpoint.shards) == shards
    for name, tensor in tensors.items():
        assert checkpoint.entry(name).shape == tuple(tensor.shape)
        assert torch.equal(checkpoint.view(name), tensor)
    tiny.plan(tmp_path)


def test_views_start_where_the_header_says_even_off_a_word(tmp_path: Path) -> None:
    """The format does not align tensors; an odd byte before one must not shift it."""
    tiny.write(tmp_path, tiny.DENSE)
    header = {
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "empty": {"dtype": "F32", "shape": [0, 3], "data_offsets": [1, 1]},
        "scalar": {"dtype": "F32", "shape": [], "data_offsets": [1, 5]},
    }
    tiny.join_shard(tmp_path / tiny.SINGLE, header, b"\x07" + struct.pack("<f", 2.5))
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.view("byte").tolist() == [7]
    assert checkpoint.view("empty").shape == (0, 3)
    assert checkpoint.view("scalar").item() == 2.5


def test_missing_shard(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    shard.unlink()
    check_refused(checkpoint, str(shard), tiny.INDEX, "is not there")


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 100, -1, -2, -500])
def test_torn_shard(checkpoint: Path, size: int) -> None:
    """Cut within the length (8 bytes), within the header, and within the data (counted from the end)."""
    shard = tiny.shard_with(checkpoint, NORM)
    raw = shard.read_bytes()
    shard.write_bytes(raw[:size])
    check_refused(checkpoint, str(shard), "torn")


def test_longer_shard(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    shard.write_bytes(shard.read_bytes() + b"\0")
    check_refused(checkpoint, str(shard), "torn")


@pytest.mark.parametrize("length", [0, 1 << 40, (1 << 64) - 1])
def test_header_of_an_impossible_length(checkpoint: Path, length: int) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    shard.write_bytes(length.to_bytes(8, "little") + shard.read_bytes()[8:])
    check_refused(checkpoint, str(shard), str(length), "torn")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"[]", "not a JSON object"),
        (b"{", "not valid JSON"),
        (b'{"a": \xff}', "not valid JSON"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a": %s}' % (b"1" * 5000), "not valid JSON"),
        (b'{"\\ud800": {}}', "not valid JSON"),
        ("{}".encode("utf-16"), "not valid JSON"),
        (b'{"a": 1, "a": 1}', "'a' is there twice"),
        (b'{"two\\nlines": 1}', "two\\nlines"),
    ],
)
def test_header_that_is_no_header(checkpoint: Path, text: bytes, word: str) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    tiny.join_shard(shard, text, b"")
    check_refused(checkpoint, str(shard), word)


@pytest.mark.parametrize(
    "claim",
    [
        None,
        [],
        "F32",
        {},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F3", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [True, 2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": "22", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": ["0", "8"]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
    ],
    ids=json.dumps,
)
def test_malformed_header_entry(tmp_path: Path, claim: object) -> None:
    tiny.write(tmp_path, tiny.DENSE)
    tiny.join_shard(tmp_path / tiny.SINGLE, {NORM: claim}, bytes(8))
    check_refused(tmp_path, tiny.SINGLE, NORM, "malformed")


def move(header: dict[str, dict[str, list[int]]], start: int, stop: int) -> None:
    offsets = header[NORM]["data_offsets"]
    offsets[0], offsets[1] = offsets[0] + start, offsets[1] + stop


@pytest.mark.parametrize(
    ("start", "stop", "words"),
    [
        (-2, -2, ["is the next free one"]),
        (0, -2, ["needs 32 bytes", "offsets give 30"]),
        (2, 0, ["needs 32 bytes", "offsets give 30"]),
        (1 << 40, 1 << 40, ["is the next free one"]),
        (0, -64, ["needs 32 bytes", "offsets give -32"]),
    ],
    ids=["overlap", "short", "late", "past the end", "backwards"],
)
def test_header_lies_about_offsets(checkpoint: Path, start: int, stop: int, words: list[str]) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    tiny.edit_header(shard, lambda header: move(header, start, stop))
    message = refusal(checkpoint)
    assert str(shard) in message
    assert all(word in message for word in words), message


def test_header_leaves_a_hole(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    header, data = tiny.split_shard(shard)
    for claim in header.values():
        if "data_offsets" in claim:
            claim["data_offsets"] = [n + 2 for n in claim["data_offsets"]]
    tiny.join_shard(shard, header, b"\0\0" + data)
    check_refused(checkpoint, str(shard), "is the next free one")


def test_two_tensors_over_the_same_bytes(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    tiny.edit_header(shard, lambda header: header.update(copy=header[NORM]))
    check_refused(checkpoint, str(shard), "is the next free one")


def test_tensor_twice(checkpoint: Path) -> None:
    """In two shards: which of them is meant, nobody can say."""
    shard = tiny.shard_with(checkpoint, NORM)
    other = next(path for path in sorted(checkpoint.glob("*.safetensors")) if path != shard)
    tensors = tiny.make_tensors(tiny.DENSE)
    header, data = tiny.split_shard(other)
    header[NORM] = {"dtype": "BF16", "shape": [16], "data_offsets": [len(data), len(data) + 32]}
    tiny.join_shard(other, header, data + tensors[NORM].view(torch.uint8).numpy().tobytes())
    check_refused(checkpoint, NORM, shard.name, other.name, "is also in")


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model-00007-of-00003.safetensors", ["model-00007-of-00003.safetensors", "is not there"]),
        ("../model-00001-of-00003.safetensors", ["outside the checkpoint's directory"]),
        ("/etc/hostname", ["/etc/hostname", "outside the checkpoint's directory"]),
        ("..", ["is not there"]),
        ("", ["is not there"]),
        ("model\0.safetensors", ["is not there"]),
    ],
)
def test_index_names_a_shard_that_is_not_there(checkpoint: Path, file: str, words: list[str]) -> None:
    tiny.edit_json(checkpoint / tiny.INDEX, lambda index: index["weight_map"].update({NORM: file}))
    check_refused(checkpoint, tiny.INDEX, *words)


def test_index_puts_a_tensor_into_another_shard(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    other = next(path for path in sorted(checkpoint.glob("*.safetensors")) if path != shard)
    tiny.edit_json(checkpoint / tiny.INDEX, lambda index: index["weight_map"].update({NORM: other.name}))
    check_refused(checkpoint, tiny.INDEX, NORM, f"says tensor {NORM} is in {other.name}, but it is in {shard.name}")


def test_index_names_a_tensor_that_no_shard_has(checkpoint: Path) -> None:
    shard = tiny.shard_with(checkpoint, NORM)
    tiny.edit_json(checkpoint / tiny.INDEX, lambda index: index["weight_map"].update(ghost=shard.name))
    check_refused(checkpoint, tiny.INDEX, "ghost", "in no shard")


@pytest.mark.parametrize("weight_map", [None, [], {NORM: 1}, "x"])
def test_index_without_a_weight_map(checkpoint: Path, weight_map: object) -> None:
    tiny.edit_json(checkpoint / tiny.INDEX, lambda index: index.update(weight_map=weight_map))
    check_refused(checkpoint, tiny.INDEX, "weight_map")


@pytest.mark.parametrize("file", ["config.json", tiny.INDEX])
@pytest.mark.parametrize(
    ("damage", "word"),
    [
        (lambda path: path.write_text('{"architectures": ['), "not valid JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "not valid JSON"),
        (lambda path: path.write_text("[1]"), "is a list, a JSON object is needed"),
        (lambda path: (path.unlink(), path.mkdir()), "can't be read"),
    ],
    ids=["torn", "bytes", "list", "directory"],
)
def test_json_file_that_is_none(checkpoint: Path, file: str, damage: Damage, word: str) -> None:
    damage(checkpoint / file)
    check_refused(checkpoint, str(checkpoint / file), word)


def test_no_weights_and_no_configuration(tmp_path: Path) -> None:
    check_refused(tmp_path, "config.json", "is not there")
    (tmp_path / "config.json").write_text(json.dumps(tiny.DENSE))
    check_refused(tmp_path, str(tmp_path), "neither", tiny.INDEX, tiny.SINGLE)


def test_missing_tensor(tmp_path: Path) -> None:
    tensors = tiny.make_tensors(tiny.DENSE)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    check_refused(tiny.write(tmp_path, tiny.DENSE, tensors), "model.layers.1.self_attn.k_proj.weight", "missing")


def test_wrong_shape(tmp_path: Path) -> None:
    """The transpose has as many bytes; only the shape tells."""
    tensors = tiny.make_tensors(tiny.DENSE)
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[name] = tensors[name].T.contiguous()
    check_refused(tiny.write(tmp_path, tiny.DENSE, tensors), tiny.SINGLE, name, "[24, 16]", "asks for [16, 24]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.int16, torch.float8_e4m3fn])
def test_wrong_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tiny.make_tensors(tiny.DENSE)
    tensors[NORM] = tensors[NORM].to(dtype)
    check_refused(
        tiny.write(tmp_path, tiny.DENSE, tensors), NORM, str(dtype)[6:], "made of bfloat16, float16 or float32"
    )


def test_fused_tensors_of_two_dtypes(tmp_path: Path) -> None:
    tensors = tiny.make_tensors(tiny.DENSE)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].float()
    check_refused(tiny.write(tmp_path, tiny.DENSE, tensors), "gate_up_proj", "bfloat16, float32", "differ in dtype")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, ["MambaForCausalLM", "Qwen3ForCausalLM, Qwen3MoeForCausalLM"]),
        ({"architectures": []}, ["(none)"]),
        ({"architectures": "Qwen3ForCausalLM"}, ["(none)"]),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "only 'default'"]),
        ({"rope_parameters": None, "rope_scaling": {"type": "linear"}}, ["'linear'", "only 'default'"]),
        ({"rope_parameters": 7}, ["7", "object"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "unquantized"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"dtype": "float8_e4m3fn"}, ["dtype", "float8_e4m3fn", "bfloat16, float16, float32"]),
        ({"hidden_size": "16"}, ["hidden_size", "'16'", "positive integer"]),
        ({"num_key_value_heads": 0}, ["num_key_value_heads", "0", "positive integer"]),
        ({"num_key_value_heads": 3}, ["num_attention_heads (4)", "num_key_value_heads (3)"]),
        ({"head_dim": 5}, ["head_dim", "5", "even"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_unsupported_configuration(checkpoint: Path, fields: dict[str, object], words: list[str]) -> None:
    tiny.edit_json(checkpoint / "config.json", lambda config: config.update(fields))
    check_refused(checkpoint, str(checkpoint / "config.json"), *words)


def test_configuration_lacks_a_size(checkpoint: Path) -> None:
    tiny.edit_json(checkpoint / "config.json", lambda config: config.pop("hidden_size"))
    check_refused(checkpoint, str(checkpoint / "config.json"), "hidden_size is missing")


@pytest.mark.parametrize(
    ("fields", "tp_size", "words"),
    [
        ({}, 3, ["3 does not divide num_attention_heads (4)"]),
        ({}, 8, ["8 does not divide num_attention_heads (4)"]),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, ["6 neither divides num_key_value_heads (4)"]),
        ({"intermediate_size": 22}, 4, ["4 does not divide", "intermediate size", "(22)"]),
        (tiny.SPARSE | {"moe_intermediate_size": 6}, 4, ["4 does not divide", "experts", "(6)"]),
    ],
    ids=["heads", "too many ranks", "kv heads", "intermediate", "experts"],
)
def test_tp_that_does_not_divide(tmp_path: Path, fields: dict[str, object], tp_size: int, words: list[str]) -> None:
    directory = tiny.write(tmp_path, tiny.DENSE | fields)
    with pytest.raises(ArgumentRefusal) as caught:
        tiny.plan(directory, tp_size)
    assert "--tp-size" in str(caught.value)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("pristine"), tiny.DENSE)


@settings(max_examples=150, deadline=None)
@given(position=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
@example(position=0.0, bit=0, cut=True)
def test_no_flipped_bit_of_a_header_does_more_than_refuse(pristine: Path, position: float, bit: int, cut: bool) -> None:
    """One bit flipped, or the file cut, anywhere in length and header: read as a checkpoint, or refused in one line."""
    shard = pristine / tiny.SINGLE
    raw = shard.read_bytes()
    header_stop = 8 + int.from_bytes(raw[:8], "little")
    at = int(position * header_stop)
    damaged = bytearray(raw)
    damaged[at] ^= 1 << bit
    copy = pristine.parent / "damaged"
    tiny.write(copy, tiny.DENSE, {})
    (copy / tiny.SINGLE).write_bytes(raw[:at] if cut else damaged)
    said = ""
    try:
        tiny.plan(copy)
        checkpoint = Checkpoint.open(copy)
        assert len([checkpoint.view(name) for name in checkpoint.shard_of]) == len(checkpoint.shard_of)
    except CheckpointRefusal as refused:
        said = str(refused)
    assert len(said.splitlines()) == 1 if cut else "\n" not in said
