"""What a Hugging Face configuration says about the shapes and the places of a model's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Architectures known so far, and whether they have experts.
FAMILIES = {"Qwen3ForCausalLM": False, "Qwen3MoeForCausalLM": True}


class ConfigError(ValueError):
    """A model configuration that lacks a field, contradicts itself, or describes a family that isn't known."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes that decide a model's tensors, in elements.

    `moe_layers` are the layers whose feed-forward part is experts; `num_experts` and `moe_intermediate_size` are 0 and
    `moe_layers` is empty for a dense family. `rope_base` is the base of the rotary embedding.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_base: float
    tie_word_embeddings: bool
    num_experts: int
    moe_layers: tuple[int, ...]

    @property
    def dense_layers(self) -> tuple[int, ...]:
        """The layers whose feed-forward part is one MLP."""
        return tuple(layer for layer in range(self.num_hidden_layers) if layer not in self.moe_layers)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], where: str, architecture: str | None = None) -> ModelShape:
        """Read a configuration: the content of a `config.json`, or the keyword arguments of a configuration class.

        `where` names it in errors; `architecture` is needed where the configuration has no `architectures`. Sizes that
        have no default in the contract are required. Raises `ConfigError`.
        """
        named = architecture or next(iter(config.get("architectures") or ()), None)
        if named not in FAMILIES:
            raise ConfigError(f"{where}: architecture {named!r} is not known; known are {', '.join(FAMILIES)}")
        if config.get("attention_bias"):
            raise ConfigError(f"{where}: attention_bias is true; only models without it are supported")
        layers = _size(config, where, "num_hidden_layers")
        experts = inter = 0
        moe_layers: tuple[int, ...] = ()
        if FAMILIES[named]:
            experts = _size(config, where, "num_experts", "num_local_experts")
            inter = _size(config, where, "moe_intermediate_size")
            step = _size(config, where, "decoder_sparse_step") if "decoder_sparse_step" in config else 1
            dense = config.get("mlp_only_layers") or ()
            moe_layers = tuple(n for n in range(layers) if n not in dense and (n + 1) % step == 0)
        return cls(
            architecture=named,
            vocab_size=_size(config, where, "vocab_size"),
            hidden_size=_size(config, where, "hidden_size"),
            intermediate_size=_size(config, where, "intermediate_size"),
            moe_intermediate_size=inter,
            num_hidden_layers=layers,
            num_attention_heads=_size(config, where, "num_attention_heads"),
            num_key_value_heads=_size(config, where, "num_key_value_heads"),
            head_dim=_size(config, where, "head_dim"),
            max_position_embeddings=_size(config, where, "max_position_embeddings"),
            rope_base=_rope_base(config, where),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            num_experts=experts,
            moe_layers=moe_layers,
        )


def _size(config: Mapping[str, Any], where: str, *names: str) -> int:
    """Return the first of `names` that the configuration has, a positive integer."""
    for name in names:
        value = config.get(name)
        if value is not None:
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
            raise ConfigError(f"{where}: {name} is {value!r}; it must be a positive integer")
    raise ConfigError(f"{where}: {names[0]} is missing")


def _rope_base(config: Mapping[str, Any], where: str) -> float:
    parameters, scaling = (config.get(name) or {} for name in ("rope_parameters", "rope_scaling"))
    for name, table in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(table, Mapping):
            raise ConfigError(f"{where}: {name} is {table!r}; it must be a table of its fields")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{where}: {name} has rope_type {kind!r}; only 'default' is supported")
    found = [value for value in (config.get("rope_theta"), parameters.get("rope_theta")) if value is not None]
    for base in found:
        if isinstance(base, bool) or not isinstance(base, int | float) or not base > 0:
            raise ConfigError(f"{where}: rope_theta is {base!r}; it must be a positive number")
    if len(found) == 2 and found[0] != found[1]:
        raise ConfigError(f"{where}: rope_theta is {found[0]!r}, but {found[1]!r} in rope_parameters")
    return float(found[0]) if found else 10000.0
