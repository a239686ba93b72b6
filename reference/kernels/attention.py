"""Paged attention in plain torch: the definition that faster kernels are compared with.

A pool holds `num_blocks` blocks of `block_size` tokens. A sequence's block table names the blocks of its positions in
order, so position `p` lives in block `block_table[p // block_size]` at offset `p % block_size`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

# Rows of queries attended at once: bounds the scores held at a time to this many rows of the longest sequence.
_QUERY_ROWS = 512


@dataclass(frozen=True)
class AttentionBatch:
    """What attention needs to know of one forward pass. `T` new tokens in all, sequence after sequence.

    num_new_tokens: new tokens of each sequence; starts: the position of its first new token, that is the number of
    tokens already in the pool. block_tables: `[sequences, blocks of the longest]`, int64, rows filled up with 0.
    positions: `[T]`, int64. slot_mapping: `[T]`, int64, where each new token's keys and values go:
    `block * block_size + offset`.
    """

    num_new_tokens: tuple[int, ...]
    starts: tuple[int, ...]
    block_tables: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor

    @classmethod
    def make(
        cls,
        num_new_tokens: Sequence[int],
        starts: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionBatch:
        """Lay out a batch. Each block table must cover its sequence's `start + num_new_tokens` positions."""
        positions = [list(range(start, start + count)) for start, count in zip(starts, num_new_tokens, strict=True)]
        slots = [
            table[p // block_size] * block_size + p % block_size
            for table, sequence in zip(block_tables, positions, strict=True)
            for p in sequence
        ]
        width = max(len(table) for table in block_tables)
        tables = [[*table, *[0] * (width - len(table))] for table in block_tables]
        return cls(
            num_new_tokens=tuple(num_new_tokens),
            starts=tuple(starts),
            block_tables=torch.tensor(tables, dtype=torch.int64, device=device),
            positions=torch.tensor(list(chain.from_iterable(positions)), dtype=torch.int64, device=device),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        )


def write_cache(cache: torch.Tensor, new: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write the new tokens' keys or values into their slots, in place.

    cache: `[num_blocks, block_size, kv_heads, head_dim]`; new: `[T, kv_heads, head_dim]`, same dtype.
    """
    cache.view(-1, *cache.shape[2:]).index_copy_(0, slot_mapping, new)


def paged_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch, scale: float
) -> torch.Tensor:
    """Return causal attention of each new token over its own sequence: `[T, heads, head_dim]`, dtype of `q`.

    q: `[T, heads, head_dim]`; caches: `[num_blocks, block_size, kv_heads, head_dim]`, the new tokens already written.
    Query head `h` reads KV head `h // (heads / kv_heads)`. `scale` multiplies the scores. Scores, softmax and sums are
    float32. Each sequence is computed on its own, so its result does not depend on what else is in the batch.
    """
    out = torch.empty_like(q)
    block_size, first = k_cache.shape[1], 0
    for index, (count, start) in enumerate(zip(batch.num_new_tokens, batch.starts, strict=True)):
        length = start + count
        table = batch.block_tables[index, : -(-length // block_size)]
        k = k_cache[table].flatten(0, 1)[:length].float()
        v = v_cache[table].flatten(0, 1)[:length].float()
        for row in range(0, count, _QUERY_ROWS):
            rows = slice(first + row, first + min(row + _QUERY_ROWS, count))
            out[rows] = _attend(q[rows].float(), k, v, start + row, scale)
        first += count
    return out


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, scale: float) -> torch.Tensor:
    """Attend rows at positions `start` onwards, `[n, heads, d]`, to keys and values `[length, kv_heads, d]`."""
    n, heads, head_dim = q.shape
    length, kv_heads, _ = k.shape
    grouped = q.view(n, kv_heads, heads // kv_heads, head_dim).permute(1, 2, 0, 3)
    scores = grouped @ k.permute(1, 2, 0).unsqueeze(1) * scale
    if start + 1 < length:
        key, query = torch.arange(length, device=q.device), torch.arange(start, start + n, device=q.device)
        scores = scores.masked_fill(key > query.unsqueeze(1), float("-inf"))
    attended = scores.softmax(-1) @ v.transpose(0, 1).unsqueeze(1)
    return attended.permute(2, 0, 1, 3).reshape(n, heads, head_dim)
