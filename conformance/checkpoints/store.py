"""Where checkpoints are kept, and the lock under which each is made once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from safetensors import safe_open

from conformance.checkpoints.recipe import Recipe

ENVIRONMENT = "WEIGHT_CACHE_CONFORMANCE_DIR"


class MakerFailed(Exception):
    """The maker's process ended with an error; the text is the end of what it said."""


@dataclass(frozen=True)
class Answer:
    """One prompt and what `transformers` computes for it in float32.

    `logprobs` `[len(input_ids) + len(output_ids) - 1, vocab]`: the next token's log-probabilities at each position.
    """

    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk. `path` is what an engine loads; `expected_path` lies beside it."""

    recipe: Recipe
    path: Path
    expected_path: Path

    @cached_property
    def answers(self) -> tuple[Answer, ...]:
        """What `transformers` computes, a prompt each. Raises OSError or SafetensorError where the file was damaged."""
        found = []
        with safe_open(self.expected_path / "expected.safetensors", framework="numpy") as file:
            for index in range(sum(name.endswith(".input_ids") for name in file.keys())):  # noqa: SIM118
                found.append(
                    Answer(
                        input_ids=tuple(file.get_tensor(f"{index}.input_ids").tolist()),
                        output_ids=tuple(file.get_tensor(f"{index}.output_ids").tolist()),
                        logprobs=file.get_tensor(f"{index}.logprobs"),
                    )
                )
        return tuple(found)

    @cached_property
    def vocab_size(self) -> int:
        """The vocabulary of the model, which may be larger than its tokenizer's."""
        return int(json.loads((self.path / "config.json").read_text())["vocab_size"])


def default_directory() -> Path:
    """Return `$WEIGHT_CACHE_CONFORMANCE_DIR`, else `weight-cache-conformance` in the user's cache directory."""
    if chosen := os.environ.get(ENVIRONMENT):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weight-cache-conformance"


def ensure(recipe: Recipe, directory: Path | None = None) -> Checkpoint:
    """Return the recipe's checkpoint, made now if it isn't there. See `ensure_all`."""
    return ensure_all([recipe], directory)[0]


def ensure_all(recipes: Sequence[Recipe], directory: Path | None = None) -> list[Checkpoint]:
    """Return the recipes' checkpoints, in order; those that aren't there are made now, by one process.

    Safe to call from several processes: one makes a checkpoint, the others wait. It appears whole or not at all.
    Raises `MakerFailed`.
    """
    directory = directory or default_directory()
    places = {recipe.key: directory / recipe.key for recipe in recipes}
    missing = {recipe.key: recipe for recipe in recipes if not places[recipe.key].is_dir()}
    if missing:
        directory.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            for key in sorted(missing):  # in one order, so that two makers can't wait for each other
                locks.enter_context(FileLock(directory / f"{key}.lock"))
            _make([recipe for key, recipe in missing.items() if not places[key].is_dir()], directory)
    found = [(recipe, places[recipe.key]) for recipe in recipes]
    return [Checkpoint(recipe, place / recipe.name, place / "expected") for recipe, place in found]


def _make(recipes: list[Recipe], directory: Path) -> None:
    """Make checkpoints whose locks the caller holds."""
    if not recipes:
        return
    for recipe in recipes:  # what a killed maker left
        for draft in directory.glob(f".{recipe.key}-*"):
            shutil.rmtree(draft, ignore_errors=True)
    drafts = {recipe.key: Path(tempfile.mkdtemp(prefix=f".{recipe.key}-", dir=directory)) for recipe in recipes}
    try:
        command = [sys.executable, "-m", "conformance.checkpoints.make"]
        for recipe in recipes:
            draft = drafts[recipe.key]
            command += ["--job", recipe.to_json(), str(draft / recipe.name), str(draft / "expected")]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            names = ", ".join(recipe.name for recipe in recipes)
            raise MakerFailed(f"checkpoints {names}: {done.stderr.strip()[-2000:]}")
        for recipe in recipes:
            drafts[recipe.key].chmod(0o755)
            drafts[recipe.key].rename(directory / recipe.key)
    finally:
        for draft in drafts.values():
            shutil.rmtree(draft, ignore_errors=True)
