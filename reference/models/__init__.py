"""Model families by Hugging Face architecture name."""

from __future__ import annotations

import torch

from reference.errors import CheckpointRefusal
from reference.models.qwen3 import SPARSE, Qwen3ForCausalLM
from reference.weights.checkpoint import Checkpoint

# The two architectures are one class: what is sparse is read off the configuration, layer by layer.
ARCHITECTURES = {"Qwen3ForCausalLM": Qwen3ForCausalLM, SPARSE: Qwen3ForCausalLM}
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def build_model(checkpoint: Checkpoint, dtype: str) -> Qwen3ForCausalLM:
    """Build this rank's part of a model on the meta device. `dtype` is a name, or `auto` for the checkpoint's.

    Raises `CheckpointRefusal` for an architecture or a dtype that is not supported.
    """
    config = checkpoint.config
    architectures = config.get("architectures")
    family = str(architectures[0]) if architectures and isinstance(architectures, list) else "(none)"
    if family not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise CheckpointRefusal(f"{checkpoint.path / 'config.json'}: architecture {family} is not one of {allowed}")
    name = config.get("dtype") or config.get("torch_dtype") if dtype == "auto" else dtype
    if name not in _DTYPES:
        raise CheckpointRefusal(
            f"{checkpoint.path / 'config.json'}: dtype {name!r} is not one of {', '.join(_DTYPES)}; give --dtype"
        )
    try:
        with torch.device("meta"):
            return ARCHITECTURES[family](config, _DTYPES[name])
    except CheckpointRefusal as error:
        # The families' own refusals begin with the file's name; here is where it lies.
        raise CheckpointRefusal(f"{checkpoint.path}/{error}") from None
    except KeyError as error:
        raise CheckpointRefusal(
            f"{checkpoint.path / 'config.json'}: {error.args[0]} is missing; {family} needs it"
        ) from None
