"""Weights that make a wrong byte visible: each tensor carries its share of the output.

Freshly initialised models are a poor subject: their norms are all ones, their logits nearly flat and their router
undecided, so that a dropped norm or a swapped expert changes almost nothing. Here each tensor is drawn by a seed and its
own name, with a gain that keeps every layer's contribution of the order of the residual stream.
"""

from __future__ import annotations

import hashlib
import math

import torch

#: Standard deviation of the logits. Wide enough that the most likely token is well apart from the next one.
LOGIT_SPREAD = 4.0
#: Standard deviation of the router's logits: top-k choices are clear, yet the k-th expert still has weight.
ROUTER_SPREAD = 2.0
#: How far norm weights range, uniformly: none is one, so that a norm left out or swapped shows.
NORM_RANGE = (0.5, 1.5)

GAINS = {
    "q_proj": 1.0,
    "k_proj": 1.0,
    "v_proj": 1.0,
    "o_proj": 2.0,
    "gate_proj": 1.5,
    "up_proj": 1.5,
    "gate_up_proj": 1.5,
    "down_proj": 2.0,
    "embed_tokens": None,
    "lm_head": LOGIT_SPREAD,
    "gate": ROUTER_SPREAD,
}


def generator(seed: int, name: str) -> torch.Generator:
    """Return a random source that depends on the seed and the tensor's name alone, not on the order of tensors."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") & (2**63 - 1))


def draw(name: str, shape: tuple[int, ...], seed: int, *, tied: bool) -> torch.Tensor:
    """Return the float32 values of one parameter. Raises KeyError for a parameter it knows no scale for."""
    source = generator(seed, name)
    stem = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if "norm" in stem:
        low, high = NORM_RANGE
        return torch.empty(shape).uniform_(low, high, generator=source)
    values = torch.empty(shape).normal_(generator=source)
    gain = GAINS[stem]
    fan_in = shape[-1]
    if gain is None:  # embeddings: of order one, unless they are the output head too
        return values * (LOGIT_SPREAD / math.sqrt(fan_in) if tied else 1.0)
    return values * (gain / math.sqrt(fan_in))


@torch.no_grad()
def initialise(model: torch.nn.Module, seed: int, *, tied: bool) -> None:
    """Overwrite every parameter of a model in float32."""
    for name, parameter in model.named_parameters():
        parameter.copy_(draw(name, tuple(parameter.shape), seed, tied=tied))
