"""The layers that the families share. Each makes its tensors on the meta device and says what they are made of.

Names and fusions follow SGLang and vLLM (`qkv_proj`, `gate_up_proj`, `w13_weight`).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

from reference.context import get_parallel
from reference.errors import ArgumentRefusal
from reference.kernels.attention import AttentionBatch, paged_attention
from reference.weights.plan import Recipe, Source, planned, whole

if TYPE_CHECKING:
    from reference.engine.kv import KVCache

VOCAB_PADDING = 64


def divide(what: str, total: int, parts: int) -> int:
    """Return `total / parts`. Raises `ArgumentRefusal` where it is not a whole number."""
    if total % parts:
        raise ArgumentRefusal(f"--tp-size: {parts} does not divide {what} ({total}); give one of its divisors")
    return total // parts


def local_kv_heads(kv_heads: int) -> int:
    """Return how many KV heads a rank holds: its share, or one that it has in common with its neighbours."""
    tp_size = get_parallel().tp_size
    if kv_heads % tp_size and tp_size % kv_heads:
        raise ArgumentRefusal(
            f"--tp-size: {tp_size} neither divides num_key_value_heads ({kv_heads}) nor is a multiple of it"
        )
    return max(1, kv_heads // tp_size)


def rows(tensor: str, of: tuple[int, int], first: int, count: int, at: tuple[int, ...]) -> Source:
    """Return `count` rows of a `[out, in]` checkpoint matrix, landing at `at`."""
    return Source(tensor, of, (first, 0), (first + count, of[1]), at)


def columns(tensor: str, of: tuple[int, int], first: int, count: int, at: tuple[int, ...]) -> Source:
    """Return `count` columns of a `[out, in]` checkpoint matrix, landing at `at`."""
    return Source(tensor, of, (0, first), (of[0], first + count), at)


class RMSNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467), computed in float32. Weight `[size]`."""

    def __init__(self, prefix: str, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = planned((size,), dtype, whole(f"{prefix}.weight", (size,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


class VocabParallelEmbedding(nn.Module):
    """This rank's rows of the embedding table, padded with zero rows. Weight `[padded_vocab / tp, hidden]`."""

    def __init__(self, prefix: str, vocab_size: int, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        parallel = get_parallel()
        multiple = math.lcm(VOCAB_PADDING, parallel.tp_size)
        self.rows = -(-vocab_size // multiple) * multiple // parallel.tp_size
        self.first = parallel.tp_rank * self.rows
        count = max(0, min(self.rows, vocab_size - self.first))
        # A rank whose rows are all padding still names the tensor: its dtype decides between copy and cast.
        source = rows(f"{prefix}.weight", (vocab_size, hidden), min(self.first, vocab_size), count, (0, 0))
        self.weight = planned((self.rows, hidden), dtype, Recipe((source,)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look token ids `[T]` up: `[T, hidden]`, equal on every rank."""
        local = ids - self.first
        mine = (local >= 0) & (local < self.rows)
        out = F.embedding(torch.where(mine, local, 0), self.weight) * mine[:, None]
        return get_parallel().tp_group.all_reduce(out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Score rows `[n, hidden]` against the whole vocabulary: `[n, padded_vocab]`, float32."""
        return get_parallel().tp_group.all_gather(F.linear(hidden, self.weight).float(), dim=-1)


class ColumnParallelLinear(nn.Module):
    """Rows of one or more fused projections, split over ranks. Weight `[rows, in]`."""

    def __init__(self, sources: tuple[Source, ...], size: tuple[int, int], dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = planned(size, dtype, Recipe(sources))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project without communication: each rank has its own rows."""
        return F.linear(x, self.weight)


class ReplicatedLinear(nn.Module):
    """A projection that every rank holds whole. Weight `[out, in]`."""

    def __init__(self, prefix: str, out: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = planned((out, inner), dtype, whole(f"{prefix}.weight", (out, inner)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in]` to `[T, out]`, equal on every rank."""
        return F.linear(x, self.weight)


class RowParallelLinear(nn.Module):
    """Columns of a projection, split over ranks and summed. Weight `[out, in / tp]`."""

    def __init__(self, prefix: str, out: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()
        parallel = get_parallel()
        n = divide(f"the inner size of {prefix}", inner, parallel.tp_size)
        source = columns(f"{prefix}.weight", (out, inner), parallel.tp_rank * n, n, (0, 0))
        self.weight = planned((out, n), dtype, Recipe((source,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Project `[T, in / tp]` to `[T, out]`, summed over ranks."""
        return get_parallel().tp_group.all_reduce(F.linear(x, self.weight))


def merged_column(
    prefix: str, names: tuple[str, ...], out: int, inner: int, dtype: torch.dtype
) -> ColumnParallelLinear:
    """Return the fusion of projections of equal size (`gate_proj`, `up_proj`), each split by rows."""
    parallel = get_parallel()
    n = divide(f"the intermediate size of {prefix}", out, parallel.tp_size)
    sources = tuple(
        rows(f"{prefix}.{name}.weight", (out, inner), parallel.tp_rank * n, n, (i * n, 0))
        for i, name in enumerate(names)
    )
    return ColumnParallelLinear(sources, (n * len(names), inner), dtype)


class RotaryEmbedding(nn.Module):
    """Rotary position embedding in the half-split form (arXiv 2104.09864). Table `[max_position, head_dim]`, float32."""

    def __init__(self, head_dim: int, max_position: int, base: float) -> None:
        super().__init__()
        rope = {"op": "rope", "base": float(base), "head_dim": head_dim, "max_position": max_position}
        self.cos_sin_cache = planned((max_position, head_dim), torch.float32, Recipe(derived=rope, kind="derived"))

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines for positions `[T]`, each `[T, 1, head_dim / 2]`."""
        cos, sin = self.cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
        return cos, sin


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn heads `[T, heads, head_dim]` by their positions' angles, in float32."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with per-head norms of queries and keys (Qwen3), split by heads."""

    def __init__(
        self,
        prefix: str,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        parallel = get_parallel()
        self.layer, self.head_dim = layer, head_dim
        self.heads = q = divide("num_attention_heads", heads, parallel.tp_size)
        self.kv_heads = kv = local_kv_heads(kv_heads)
        first_kv = parallel.tp_rank * kv_heads // parallel.tp_size
        d, p = head_dim, prefix
        sources = (
            rows(f"{p}.q_proj.weight", (heads * d, hidden), parallel.tp_rank * q * d, q * d, (0, 0)),
            rows(f"{p}.k_proj.weight", (kv_heads * d, hidden), first_kv * d, kv * d, (q * d, 0)),
            rows(f"{p}.v_proj.weight", (kv_heads * d, hidden), first_kv * d, kv * d, ((q + kv) * d, 0)),
        )
        self.qkv_proj = ColumnParallelLinear(sources, ((q + 2 * kv) * d, hidden), dtype)
        self.q_norm = RMSNorm(f"{p}.q_norm", d, eps, dtype)
        self.k_norm = RMSNorm(f"{p}.k_norm", d, eps, dtype)
        self.o_proj = RowParallelLinear(f"{p}.o_proj", hidden, heads * d, dtype)

    def forward(
        self, x: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], batch: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Attend from new tokens `[T, hidden]` to all tokens of their sequences so far."""
        q, k, v = (
            self.qkv_proj(x).view(x.shape[0], -1, self.head_dim).split([self.heads, self.kv_heads, self.kv_heads], 1)
        )
        q, k = rotate(self.q_norm(q), *rope), rotate(self.k_norm(k), *rope)
        kv_cache.write(self.layer, k, v, batch)
        out = paged_attention(q, kv_cache.k[self.layer], kv_cache.v[self.layer], batch, self.head_dim**-0.5)
        return self.o_proj(out.reshape(x.shape[0], -1))


class GatedMLP(nn.Module):
    """Gated feed-forward with SiLU (arXiv 2002.05202), split over the intermediate size."""

    def __init__(self, prefix: str, hidden: int, intermediate: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up_proj = merged_column(prefix, ("gate_proj", "up_proj"), intermediate, hidden, dtype)
        self.down_proj = RowParallelLinear(f"{prefix}.down_proj", hidden, intermediate, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[T, hidden]` to `[T, hidden]`."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class FusedMoE(nn.Module):
    """This rank's expert slots, stacked.

    `w13_weight` is `[slots, 2 * inter/tp, hidden]`, `w2_weight` `[slots, hidden, inter/tp]`.
    """

    def __init__(
        self, prefix: str, layer: int, slots: tuple[int, ...], hidden: int, intermediate: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        parallel = get_parallel()
        n = divide(f"the intermediate size of {prefix}", intermediate, parallel.tp_size)
        first = parallel.tp_rank * n
        self.expert_slots = {layer: slots}
        w13, w2 = [], []
        for slot, expert in enumerate(slots):
            up_shape = (intermediate, hidden)
            for i, name in enumerate(("gate_proj", "up_proj")):
                w13.append(rows(f"{prefix}.{expert}.{name}.weight", up_shape, first, n, (slot, i * n, 0)))
            w2.append(columns(f"{prefix}.{expert}.down_proj.weight", (hidden, intermediate), first, n, (slot, 0, 0)))
        self.w13_weight = planned((len(slots), 2 * n, hidden), dtype, Recipe(tuple(w13), stacked=True))
        self.w2_weight = planned((len(slots), hidden, n), dtype, Recipe(tuple(w2), stacked=True))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Send each token `[T, hidden]` to its slots `[T, k]` and sum the answers by `weights` `[T, k]`, over ranks."""
        out = torch.zeros_like(x)
        for slot in ids.unique().tolist():
            token, choice = (ids == slot).nonzero(as_tuple=True)
            gate, up = F.linear(x[token], self.w13_weight[slot]).chunk(2, dim=-1)
            answer = F.linear(F.silu(gate) * up, self.w2_weight[slot])
            out.index_add_(0, token, answer * weights[token, choice, None])
        return get_parallel().tp_group.all_reduce(out)
