"""Bad input at the command line: one clear line naming what and where, a non-zero exit, nothing left over."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.checkpoints import Recipe, ensure
from conformance.selftest import tiny
from conformance.selftest.reference_process import Workshop, open_workshop
from matrix.space import load_space


@pytest.fixture(scope="module")
def model() -> Path:
    return ensure(Recipe.of(load_space().model("qwen3-moe-tiny"))).path


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_workshop() as workshop:
        yield workshop


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint to damage."""
    return Path(shutil.copytree(model, tmp_path / "damaged"))


def shards(model: Path) -> list[Path]:
    return sorted(model.glob("model-*.safetensors"))


def edit_config(model: Path, **fields: object) -> None:
    tiny.edit_json(model / "config.json", lambda config: config.update(fields))


def missing_shard(model: Path) -> list[str]:
    shards(model)[1].unlink()
    return [shards(model)[0].name.replace("00001", "00002"), "not there"]


def torn_shard(model: Path) -> list[str]:
    shard = shards(model)[0]
    shard.write_bytes(shard.read_bytes()[:-100])
    return [shard.name, "torn"]


def torn_header(model: Path) -> list[str]:
    shard = shards(model)[0]
    shard.write_bytes(shard.read_bytes()[:100])
    return [shard.name, "torn"]


def index_names_another_shard(model: Path) -> list[str]:
    named = {"model.norm.weight": "model-00099-of-00099.safetensors"}
    tiny.edit_json(model / tiny.INDEX, lambda index: index["weight_map"].update(named))
    return ["model-00099-of-00099.safetensors", "not there"]


def header_lies_about_offsets(model: Path) -> list[str]:
    shard = tiny.shard_with(model, "model.norm.weight")

    def swap_size(header: dict[str, Any]) -> None:
        start, stop = header["model.norm.weight"]["data_offsets"]
        header["model.norm.weight"]["data_offsets"] = [start, stop - 4]

    tiny.edit_header(shard, swap_size)
    return [shard.name, "model.norm.weight", "256", "252"]


def wrong_shape(model: Path) -> list[str]:
    tiny.edit_header(
        tiny.shard_with(model, "model.norm.weight"), lambda h: h["model.norm.weight"].update(shape=[32, 2])
    )
    return ["model.norm.weight", "[32, 2]", "[64]"]


def wrong_dtype(model: Path) -> list[str]:
    tiny.edit_header(tiny.shard_with(model, "model.norm.weight"), lambda h: h["model.norm.weight"].update(dtype="I32"))
    return ["model.norm.weight", "int32", "bfloat16, float16 or float32"]


def unsupported_architecture(model: Path) -> list[str]:
    edit_config(model, architectures=["MambaForCausalLM"])
    return ["config.json", "MambaForCausalLM", "Qwen3ForCausalLM, Qwen3MoeForCausalLM"]


def quantized(model: Path) -> list[str]:
    edit_config(model, quantization_config={"quant_method": "fp8"})
    return ["config.json", "quantization_config"]


def missing_config(model: Path) -> list[str]:
    (model / "config.json").unlink()
    return ["config.json", "not there"]


DAMAGES = [
    missing_shard,
    torn_shard,
    torn_header,
    index_names_another_shard,
    header_lies_about_offsets,
    wrong_shape,
    wrong_dtype,
    unsupported_architecture,
    quantized,
    missing_config,
]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
@pytest.mark.parametrize("command", ["daemon", "engine"])
def test_damaged_checkpoint(workshop: Workshop, copy: Path, command: str, damage: Callable[[Path], list[str]]) -> None:
    said = damage(copy)
    error = workshop.refused(command, "--model-path", str(copy), "--tp-size", "2", *port(command))
    assert all(word in error for word in said), error
    assert workshop.left_over() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp-size", "3"], ["--tp-size", "3 does not divide num_attention_heads (4)"]),
        (["--tp-size", "0"], ["--tp-size", "at least 1"]),
        (["--dtype", "int8"], ["--dtype", "int8", "bfloat16"]),
        (["--weight-cache-mode", "on"], ["--weight-cache-mode", "on", "client"]),
        (["--weight-cache-detach"], ["--weight-cache-detach", "daemon"]),
        (["--context-length", "513"], ["--context-length", "513", "512"]),
        (["--no-such-flag"], ["--no-such-flag", "--help"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_bad_argument(workshop: Workshop, model: Path, arguments: list[str], said: list[str]) -> None:
    error = workshop.refused("engine", "--model-path", str(model), "--port", "0", *arguments)
    assert all(word in error for word in said), error
    assert workshop.left_over() == []


def test_no_such_model_path(workshop: Workshop, tmp_path: Path) -> None:
    assert "--model-path" in workshop.refused("daemon", "--model-path", str(tmp_path / "absent"))


def test_port_in_use(workshop: Workshop, model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = str(taken.getsockname()[1])
        mode = ["--weight-cache-mode", "daemon"]
        error = workshop.refused("engine", "--model-path", str(model), "--port", number, *mode)
    assert f"127.0.0.1:{number}" in error
    assert "--port 0" in error
    assert workshop.left_over() == []


def test_client_without_a_daemon(workshop: Workshop, model: Path) -> None:
    mode = ["--weight-cache-mode", "client"]
    error = workshop.refused("engine", "--model-path", str(model), "--port", "0", *mode)
    assert "no weight cache daemon" in error
    assert "cpu-0" in error
    assert "--weight-cache-fallback disk" in error


def test_daemon_that_is_already_there(workshop: Workshop, model: Path) -> None:
    daemon = workshop.daemon(model, "--tp-size", "2")
    before = workshop.left_over()
    error = workshop.refused("daemon", "--model-path", str(model), "--tp-size", "2")
    assert "already holds this key" in error
    assert "--weight-cache-mode client" in error
    mode = ["--weight-cache-mode", "daemon"]
    assert "already holds this key" in workshop.refused(
        "engine", "--model-path", str(model), "--tp-size", "2", "--port", "0", *mode
    )
    assert workshop.left_over() == before
    assert daemon.stop().clean
    assert workshop.left_over() == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tp-size", "1"], ["--tp-size (2 in the daemon, 1 in the engine)", "shape is"]),
        (["--tp-size", "2", "--dtype", "bfloat16"], ["--dtype (auto in the daemon, bfloat16 in the engine)"]),
    ],
    ids=["tp", "dtype"],
)
def test_client_beside_another_layouts_daemon(
    workshop: Workshop, model: Path, arguments: list[str], said: list[str]
) -> None:
    daemon = workshop.daemon(model, "--tp-size", "2")
    mode = ["--weight-cache-mode", "client", "--port", "0"]
    error = workshop.refused("engine", "--model-path", str(model), *arguments, *mode)
    assert all(word in error for word in said), error
    # It reads the disk only when told to, and says so.
    engine, _ = workshop.engine(model, *arguments, *mode[:2], "--weight-cache-fallback", "disk")
    assert "reads the disk instead of the weight cache" in engine.tail()
    assert engine.stop().clean
    assert daemon.stop().clean


@pytest.mark.parametrize("verify", ["full", "sampled"])
def test_client_with_other_content_of_equal_headers(workshop: Workshop, model: Path, copy: Path, verify: str) -> None:
    """Two fine-tunes of one base have equal headers; the bytes decide."""
    daemon = workshop.daemon(model)
    shard = tiny.shard_with(copy, "model.norm.weight")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    options = ["--weight-cache-mode", "client", "--checkpoint-verify", verify, "--port", "0"]
    error = workshop.refused("engine", "--model-path", str(copy), *options)
    assert "differs in content" in error
    assert daemon.stop().clean


@pytest.mark.parametrize("verify", ["full", "sampled"])
def test_client_attaches_to_an_equal_checkpoint_elsewhere(
    workshop: Workshop, model: Path, copy: Path, verify: str
) -> None:
    daemon = workshop.daemon(model)
    options = ["--weight-cache-mode", "client", "--checkpoint-verify", verify]
    engine, _ = workshop.engine(copy, *options)
    assert engine.stop().clean
    assert daemon.stop().clean


def port(command: str) -> list[str]:
    return ["--port", "0"] if command == "engine" else []
