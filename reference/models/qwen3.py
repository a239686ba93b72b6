"""Qwen3 and Qwen3-MoE (arXiv 2505.09388), which differ only in some layers' feed-forward part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from reference.errors import CheckpointRefusal
from reference.kernels.attention import AttentionBatch
from reference.models.layers import (
    Attention,
    FusedMoE,
    GatedMLP,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    VocabParallelEmbedding,
    local_kv_heads,
)

if TYPE_CHECKING:
    from reference.engine.kv import KVCache

SPARSE = "Qwen3MoeForCausalLM"
_KNOWN_ABSENT = {"attention_bias": False, "use_sliding_window": False, "hidden_act": "silu"}
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_experts_per_tok",
    "decoder_sparse_step",
    "max_position_embeddings",
)


class SparseMoeBlock(nn.Module):
    """A router and its experts. Gate `[experts, hidden]`; the router works on logical experts."""

    def __init__(self, prefix: str, layer: int, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        experts, hidden = num_experts(config), config["hidden_size"]
        self.top_k, self.norm_topk_prob = config["num_experts_per_tok"], config.get("norm_topk_prob", False)
        self.gate = ReplicatedLinear(f"{prefix}.gate", experts, hidden, dtype)
        slots = tuple(range(experts))
        self.experts = FusedMoE(f"{prefix}.experts", layer, slots, hidden, config["moe_intermediate_size"], dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`, each token through its `top_k` experts."""
        scores = self.gate(x).float().softmax(-1)
        weights, ids = scores.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(x, ids, weights.to(x.dtype))


class DecoderLayer(nn.Module):
    """Attention, then a dense or a sparse feed-forward part, each behind a norm and beside a residual."""

    def __init__(self, prefix: str, layer: int, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config["hidden_size"], config["rms_norm_eps"]
        self.input_layernorm = RMSNorm(f"{prefix}.input_layernorm", hidden, eps, dtype)
        self.self_attn = Attention(
            f"{prefix}.self_attn",
            layer,
            hidden,
            config["num_attention_heads"],
            config["num_key_value_heads"],
            head_dim(config),
            eps,
            dtype,
        )
        self.post_attention_layernorm = RMSNorm(f"{prefix}.post_attention_layernorm", hidden, eps, dtype)
        self.mlp = (
            SparseMoeBlock(f"{prefix}.mlp", layer, config, dtype)
            if is_moe_layer(config, layer)
            else GatedMLP(f"{prefix}.mlp", hidden, config["intermediate_size"], dtype)
        )

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        x = x + self.self_attn(self.input_layernorm(x), rope, batch, kv_cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Backbone(nn.Module):
    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.embed_tokens = VocabParallelEmbedding("model.embed_tokens", config["vocab_size"], hidden, dtype)
        self.layers = nn.ModuleList(
            DecoderLayer(f"model.layers.{i}", i, config, dtype) for i in range(config["num_hidden_layers"])
        )
        self.norm = RMSNorm("model.norm", hidden, config["rms_norm_eps"], dtype)
        self.rotary_emb = RotaryEmbedding(head_dim(config), config["max_position_embeddings"], rope_base(config))


class Qwen3ForCausalLM(nn.Module):
    """The whole model, for this rank. Built on the meta device; `weights.fill.bind` gives it its tensors.

    `num_layers`, `kv_heads` (this rank's), `head_dim` and `dtype` say what KV cache it needs.
    """

    def __init__(self, config: dict[str, Any], dtype: torch.dtype) -> None:
        super().__init__()
        _check_config(config)
        self.model = _Backbone(config, dtype)
        self.lm_head = (
            self.model.embed_tokens
            if config.get("tie_word_embeddings", False)
            else VocabParallelEmbedding("lm_head", config["vocab_size"], config["hidden_size"], dtype)
        )
        self.num_layers = int(config["num_hidden_layers"])
        self.kv_heads = local_kv_heads(config["num_key_value_heads"])
        self.head_dim = head_dim(config)
        self.dtype = dtype

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Run tokens `[T]` at `positions` `[T]`, both int64, and return their last hidden states `[T, hidden]`."""
        x = self.model.embed_tokens(input_ids)
        rope = self.model.rotary_emb(positions)
        for layer in self.model.layers:
            x = layer(x, rope, batch, kv_cache)
        return self.model.norm(x)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits of rows `[n, hidden]`: `[n, padded_vocab]`, float32. Every rank calls it with the same rows."""
        return self.lm_head.logits(hidden)


def num_experts(config: dict[str, Any]) -> int:
    """Return the number of logical experts, 0 for a dense family whatever its configuration has left over."""
    if config["architectures"][0] != SPARSE:
        return 0
    return int(config.get("num_experts") or config.get("num_local_experts") or 0)


def is_moe_layer(config: dict[str, Any], layer: int) -> bool:
    """Say whether a layer's feed-forward part is sparse."""
    sparse = num_experts(config) > 0 and layer not in (config.get("mlp_only_layers") or ())
    return sparse and (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def head_dim(config: dict[str, Any]) -> int:
    """Return the size of a head. It must be stated: implementations differ in what they take in its absence."""
    return int(config["head_dim"])


def rope_base(config: dict[str, Any]) -> float:
    """Return the rope base, in either generation of Hugging Face configuration."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointRefusal(f"config.json: rope parameters are {rope!r}, an object is needed")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise CheckpointRefusal(f"config.json: rope type {kind!r} is not supported, only 'default'")
    return float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)


def _check_config(config: dict[str, Any]) -> None:
    for name, needed in _KNOWN_ABSENT.items():
        if config.get(name, needed) != needed:
            raise CheckpointRefusal(f"config.json: {name} is {config[name]!r}, only {needed!r} is supported")
    if config.get("quantization_config"):
        raise CheckpointRefusal("config.json: quantization_config is there, only unquantized checkpoints are supported")
    for name in _SIZES:
        value = config.get(name)
        if value is not None and not (type(value) is int and value > 0):
            raise CheckpointRefusal(f"config.json: {name} is {value!r}, a positive integer is needed")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    if heads % kv_heads:
        raise CheckpointRefusal(
            f"config.json: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})"
        )
    if head_dim(config) % 2:
        raise CheckpointRefusal(f"config.json: head_dim is {head_dim(config)}, rotary embedding needs an even one")
