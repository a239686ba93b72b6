"""Make checkpoints: run as a process of its own, so that nobody else has to import torch and transformers.

`python -m conformance.checkpoints.make --job RECIPE_JSON CHECKPOINT_DIR EXPECTED_DIR [--job ...]`
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing here comes from a hub; don't let a library ask one

import torch
import transformers
from safetensors.torch import save_file

from conformance.checkpoints import prompts, tokenizer, weights
from conformance.checkpoints.recipe import Recipe


def make_checkpoint(recipe: Recipe, directory: Path) -> None:
    """Write weights, index, configuration and tokenizer. Raises AttributeError for an unknown architecture."""
    words = tokenizer.train(recipe.config["vocab_size"])
    model_class = getattr(transformers, recipe.architecture)
    ends: dict[str, Any] = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    config = model_class.config_class(**recipe.config, **ends)
    model = model_class(config)
    weights.initialise(model, recipe.seed, tied=config.tie_word_embeddings)
    model.to(getattr(torch, recipe.dtype))
    model.generation_config = transformers.GenerationConfig(do_sample=False, **ends)
    model.save_pretrained(directory, max_shard_size=recipe.max_shard_size)
    words.save_pretrained(directory, save_jinja_files=False)


def make_expected(recipe: Recipe, checkpoint: Path, directory: Path) -> None:
    """Write what `transformers` computes, in float32, from the checkpoint as it was stored."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    tensors: dict[str, torch.Tensor] = {}
    margins = []
    for index, answer in enumerate(prompts.answers(model, recipe.seed)):
        tensors[f"{index}.input_ids"] = answer.input_ids
        tensors[f"{index}.output_ids"] = answer.output_ids
        tensors[f"{index}.logprobs"] = answer.logprobs.contiguous()
        margins.append({"router": min(answer.router_margin, 1e9), "token": answer.token_margin})
    directory.mkdir(parents=True)
    metadata = {
        "checkpoint_dtype": recipe.dtype,
        "computed_in": "float32",
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "margins": json.dumps(margins),
    }
    save_file(tensors, directory / "expected.safetensors", metadata)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make checkpoints and what transformers computes from them.")
    names = ("RECIPE_JSON", "CHECKPOINT_DIR", "EXPECTED_DIR")
    parser.add_argument("--job", nargs=3, action="append", required=True, metavar=names)
    arguments = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)  # sums in one order, whatever the machine
    for recipe_json, checkpoint, expected in arguments.job:
        recipe = Recipe.from_json(recipe_json)
        make_checkpoint(recipe, Path(checkpoint))
        make_expected(recipe, Path(checkpoint), Path(expected))


if __name__ == "__main__":
    main()
