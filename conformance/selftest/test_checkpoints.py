"""Checkpoints: true, deterministic, made once, and such that a wrong byte shows."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from conformance.checkpoints import Checkpoint, MakerFailed, Recipe, ensure, ensure_all
from conformance.outputs import TOLERANCES
from matrix.space import load_space

SMALL = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
DENSE = Recipe("small", "Qwen3ForCausalLM", 5, "bfloat16", "30KB", SMALL | {"tie_word_embeddings": True})
SPARSE = Recipe(
    "small-moe",
    "Qwen3MoeForCausalLM",
    6,
    "float32",
    "40KB",
    SMALL | {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Checkpoint]:
    return ensure_all([DENSE, SPARSE], tmp_path_factory.mktemp("made"))


def weights(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(checkpoint.path.glob("*.safetensors"))}


def test_files_are_those_of_a_published_checkpoint(made: list[Checkpoint]) -> None:
    for checkpoint in made:
        index = json.loads((checkpoint.path / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(weights(checkpoint))
        assert len(weights(checkpoint)) > 1
        config = json.loads((checkpoint.path / "config.json").read_text())
        assert config["architectures"] == [checkpoint.recipe.architecture]
        assert config["dtype"] == checkpoint.recipe.dtype
        generation = json.loads((checkpoint.path / "generation_config.json").read_text())
        assert generation["eos_token_id"] == config["eos_token_id"] != config["pad_token_id"]
        for name, shard in index["weight_map"].items():
            with safe_open(checkpoint.path / shard, framework="numpy") as file:
                assert name in file.keys()  # noqa: SIM118 - not a mapping


def test_tokenizer_is_real(made: list[Checkpoint]) -> None:
    from jinja2 import Template
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(made[0].path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() <= SMALL["vocab_size"]
    text = "Nothing was read: 2048 bytes, café, \N{SNOWMAN}\n"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert len(tokenizer.encode("the weights of the engine").ids) < len("the weights of the engine")
    config = json.loads((made[0].path / "tokenizer_config.json").read_text())
    messages = [{"role": "user", "content": "hello"}]
    prompt = Template(config["chat_template"]).render(messages=messages, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.token_to_id(config["eos_token"]) == 2


def test_same_recipe_gives_same_bytes(made: list[Checkpoint], tmp_path: Path) -> None:
    again = ensure(DENSE, tmp_path)
    assert weights(again) == weights(made[0])
    for one, two in zip(made[0].answers, again.answers, strict=True):
        assert (one.input_ids, one.output_ids) == (two.input_ids, two.output_ids)
        assert np.array_equal(one.logprobs, two.logprobs)


def test_made_once_by_several_processes(tmp_path: Path) -> None:
    code = f"""if True:
        import subprocess
        from pathlib import Path
        from conformance.checkpoints import Recipe, ensure
        run = subprocess.run
        def spy(*arguments, **options):
            print("made", flush=True)
            return run(*arguments, **options)
        subprocess.run = spy
        ensure(Recipe.from_json({DENSE.to_json()!r}), Path({str(tmp_path)!r}))
    """
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate()[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(said) == ["", "made\n"]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [DENSE.key]


def test_failed_maker_leaves_nothing(tmp_path: Path) -> None:
    bad = dataclasses.replace(DENSE, config=SMALL | {"vocab_size": 100})
    with pytest.raises(MakerFailed, match="vocab_size 100: a byte-level tokenizer needs at least"):
        ensure(bad, tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.suffix != ".lock"] == []


def test_recipe_and_maker_decide_the_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changed = [dataclasses.replace(DENSE, seed=9), dataclasses.replace(DENSE, config=SMALL), SPARSE]
    assert len({recipe.key for recipe in [DENSE, *changed]}) == 4
    assert Recipe.from_json(DENSE.to_json()).key == DENSE.key
    before = DENSE.key
    monkeypatch.setattr("conformance.checkpoints.recipe.MAKER_SOURCES", ("make.py",))
    assert DENSE.key != before


def test_nothing_is_trivial(made: list[Checkpoint]) -> None:
    for checkpoint in made:
        tensors = {name: array for path in checkpoint.path.glob("*.safetensors") for name, array in load(path).items()}
        for name, array in tensors.items():
            assert np.ptp(array) > 0, name
            if "norm" in name:
                assert not np.any(array == 1), name
        contents = {array.tobytes() for array in tensors.values()}
        assert len(contents) == len(tensors)


def load(path: Path) -> dict[str, np.ndarray]:
    """Read a shard as float32."""
    import torch
    from safetensors.torch import load_file as load_torch

    return {name: tensor.to(torch.float32).numpy() for name, tensor in load_torch(path).items()}


def test_answers_are_those_of_a_model_that_decides(made: list[Checkpoint]) -> None:
    for checkpoint in made:
        for answer in checkpoint.answers:
            assert answer.logprobs.shape == (len(answer.input_ids) + len(answer.output_ids) - 1, SMALL["vocab_size"])
            assert np.allclose(np.exp(answer.logprobs).sum(-1), 1, atol=1e-4)
            tail = answer.logprobs[len(answer.input_ids) - 1 :]
            assert tuple(tail.argmax(-1)) == answer.output_ids
            assert answer.logprobs.std() > 2


CHANGES = """
import json, sys, torch, transformers
from pathlib import Path
from safetensors import safe_open
checkpoint, expected = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
file = safe_open(Path(expected) / "expected.safetensors", "pt")
answers = [(file.get_tensor(f"{i}.input_ids"), file.get_tensor(f"{i}.logprobs")) for i in range(5)]
found = {}
with torch.no_grad():
    for name, parameter in model.named_parameters():
        parts = parameter if parameter.dim() == 3 else [parameter]
        for slot, part in enumerate(parts):
            kept = part.clone()
            part.fill_(1) if "norm" in name else part.neg_()
            gaps = [model(ids[None]).logits[0].log_softmax(-1) - logprobs[: len(ids)] for ids, logprobs in answers]
            found[f"{name}[{slot}]"] = max(gap.abs().mean().item() for gap in gaps)
            part.copy_(kept)
print(json.dumps(found))
"""


@pytest.mark.parametrize("name", ["qwen3-tiny", "qwen3-moe-tiny"])
def test_every_tensor_and_expert_shows_in_the_output(name: str) -> None:
    checkpoint = ensure(Recipe.of(load_space().model(name)))
    command = [sys.executable, "-c", CHANGES, str(checkpoint.path), str(checkpoint.expected_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    shown = json.loads(done.stdout.splitlines()[-1])
    assert len(shown) > 20
    assert {part: distance for part, distance in shown.items() if distance < 10 * TOLERANCES["float32"].mean} == {}


def test_damaged_answers_are_no_answers(made: list[Checkpoint], tmp_path: Path) -> None:
    tensors = load_file(made[0].expected_path / "expected.safetensors")
    save_file(tensors, tmp_path / "expected.safetensors")
    whole = dataclasses.replace(made[0], expected_path=tmp_path)
    assert len(whole.answers) == len(made[0].answers)
    data = (tmp_path / "expected.safetensors").read_bytes()
    (tmp_path / "expected.safetensors").write_bytes(data[:-100])
    with pytest.raises(Exception, match="Error"):
        _ = dataclasses.replace(made[0], expected_path=tmp_path).answers


def test_command_names_what_it_made(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "conformance.checkpoints", "--dir", str(tmp_path), "no-such-model"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("no such model: no-such-model; there are qwen3-tiny")
