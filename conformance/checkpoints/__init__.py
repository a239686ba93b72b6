"""Small but true Hugging Face checkpoints, made once from the recipes of `matrix/space.toml` and kept in a cache.

Weights, index, configuration and tokenizer are written by `transformers`' own `save_pretrained`. Beside each lies what
`transformers` computes from it, so that tests compare against it without importing torch or transformers.
"""

from conformance.checkpoints.recipe import Model, Recipe
from conformance.checkpoints.store import Answer, Checkpoint, MakerFailed, default_directory, ensure, ensure_all

__all__ = ["Answer", "Checkpoint", "MakerFailed", "Model", "Recipe", "default_directory", "ensure", "ensure_all"]
