"""True checkpoints of a few kilobytes, made in milliseconds, and ways to damage them.

Same files as a Hugging Face checkpoint's (config.json, safetensors shards, an index where there are several), written by
`safetensors` itself. A rank of the published configuration can be planned on them without any process.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from reference.context import Ranks, override_server_args
from reference.models import build_model
from reference.parallel import initialize_groups
from reference.weights.checkpoint import Checkpoint
from reference.weights.plan import RankPlan, plan_rank

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 100,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
#: Layer 0 is dense by `mlp_only_layers`, the others have experts.
SPARSE: dict[str, Any] = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_hidden_layers": 3,
    "moe_intermediate_size": 8,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 1,
}


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint, by name. Written from the families' papers, not from `reference`."""
    hidden, d = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.input_layernorm.weight": (hidden,), f"{at}.post_attention_layernorm.weight": (hidden,)}
        shapes |= {f"{at}.self_attn.{name}_norm.weight": (d,) for name in "qk"}
        shapes |= {f"{at}.self_attn.q_proj.weight": (q, hidden), f"{at}.self_attn.o_proj.weight": (hidden, q)}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        if is_sparse(config, layer):
            shapes[f"{at}.mlp.gate.weight"] = (config["num_experts"], hidden)
            blocks = {f"{at}.mlp.experts.{e}": config["moe_intermediate_size"] for e in range(config["num_experts"])}
        else:
            blocks = {f"{at}.mlp": config["intermediate_size"]}
        for block, inner in blocks.items():
            shapes |= {f"{block}.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
            shapes[f"{block}.down_proj.weight"] = (hidden, inner)
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def is_sparse(config: dict[str, Any], layer: int) -> bool:
    """Say whether a layer's feed-forward part is experts."""
    return "num_experts" in config and layer not in config["mlp_only_layers"]


def make_tensors(config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return every tensor of a checkpoint, filled from a seed."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in tensor_shapes(config).items()}


def write(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor] | None = None, shards: int = 1
) -> Path:
    """Write a checkpoint of one file, or of several with an index; return its directory."""
    tensors = make_tensors(config) if tensors is None else tensors
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        save_file(tensors, directory / SINGLE, metadata={"format": "pt"})
        return directory
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in mine}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    (directory / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return directory


def shard_with(directory: Path, tensor: str) -> Path:
    """Return the file that holds a tensor."""
    if (directory / SINGLE).exists():
        return directory / SINGLE
    return directory / json.loads((directory / INDEX).read_text())["weight_map"][tensor]


def split_shard(shard: Path) -> tuple[dict[str, Any], bytes]:
    """Return a shard's header and the bytes behind it."""
    raw = shard.read_bytes()
    stop = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:stop]), raw[stop:]


def join_shard(shard: Path, header: dict[str, Any] | bytes, data: bytes) -> None:
    """Write a shard of any header, true or not, and any bytes behind it."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + data)


def edit_header(shard: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a shard's header and leave its bytes alone."""
    header, data = split_shard(shard)
    edit(header)
    join_shard(shard, header, data)


def edit_json(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json or the index."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


@contextmanager
def rank(directory: Path, tp_size: int = 1, tp_rank: int = 0, **arguments: Any) -> Iterator[None]:
    """Be one rank for a while, as far as configuration goes; its groups are arithmetic only."""
    arguments |= {"model_path": str(directory), "tp_size": tp_size}
    with override_server_args(ranks=Ranks(tp_rank, tp_rank), **arguments):
        initialize_groups()
        yield


def plan(directory: Path, tp_size: int = 1, tp_rank: int = 0, dtype: str = "auto") -> RankPlan:
    """Plan one rank of a checkpoint."""
    with rank(directory, tp_size, tp_rank):
        checkpoint = Checkpoint.open(directory)
        return plan_rank(build_model(checkpoint, dtype), checkpoint)
