"""Paged attention and the KV pool, against dense attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.engine.kv import BlockPool, KVCache
from reference.kernels import attention
from reference.kernels.attention import AttentionBatch, paged_attention

HEAD_DIM = 8
SCALE = 0.3


def dense(q, k, v):
    """Causal attention of the last `len(q)` positions, by a loop over heads and rows, in float64."""
    out = torch.empty_like(q)
    group = q.shape[1] // k.shape[1]
    for row in range(q.shape[0]):
        seen = k.shape[0] - q.shape[0] + row + 1
        for head in range(q.shape[1]):
            scores = k[:seen, head // group].double() @ q[row, head].double() * SCALE
            out[row, head] = (scores.softmax(0) @ v[:seen, head // group].double()).to(q.dtype)
    return out


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 7)), min_size=1, max_size=4),
    block_size=st.integers(1, 4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    query_rows=st.sampled_from([2, 512]),
    seed=st.integers(0, 1000),
)
def test_paged_attention_equals_dense(lengths, block_size, heads, query_rows, seed):
    generator = torch.Generator().manual_seed(seed)
    pool = BlockPool(num_blocks=sum(-(-(s + n) // block_size) for s, n in lengths) + 2, block_size=block_size)
    cache = KVCache.allocate(1, pool.num_blocks, block_size, heads[1], HEAD_DIM, torch.float32)
    # What nobody wrote must not be read.
    cache.k[0].fill_(float("nan"))
    cache.v[0].fill_(float("nan"))
    tables: list[list[int]] = [[] for _ in lengths]
    # Sequences grow in turns, so that their blocks are interleaved in the pool.
    for token in range(max(start + new for start, new in lengths)):
        for table, (start, new) in zip(tables, lengths, strict=True):
            if token < start + new and token % block_size == 0:
                table += pool.allocate(1)
    whole = [
        [torch.randn(start + new, count, HEAD_DIM, generator=generator) for count in (heads[0], heads[1], heads[1])]
        for start, new in lengths
    ]
    starts, news = [start for start, _ in lengths], [new for _, new in lengths]
    for table, start, (_, k, v) in zip(tables, starts, whole, strict=True):
        if start:
            before = AttentionBatch.make([start], [0], [table], block_size)
            cache.write(0, k[:start], v[:start], before)
    batch = AttentionBatch.make(news, starts, tables, block_size)
    q, k, v = (torch.cat([one[i][start:] for one, start in zip(whole, starts, strict=True)]) for i in range(3))
    cache.write(0, k, v, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_QUERY_ROWS", query_rows)
        got = paged_attention(q, cache.k[0], cache.v[0], batch, SCALE)
    expected = torch.cat([dense(q[start:], k, v) for start, (q, k, v) in zip(starts, whole, strict=True)])
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert batch.positions.tolist() == [p for s, n in lengths for p in range(s, s + n)]


def test_a_sequence_does_not_depend_on_its_batch():
    torch.manual_seed(0)
    cache = KVCache.allocate(1, 8, 4, 2, HEAD_DIM, torch.bfloat16)
    k, v = torch.randn(2, 32, 2, HEAD_DIM).bfloat16()
    both = AttentionBatch.make([16, 16], [0, 0], [[0, 2, 4, 6], [1, 3, 5, 7]], 4)
    cache.write(0, k, v, both)
    q = torch.randn(2, 4, HEAD_DIM).bfloat16()
    together = AttentionBatch.make([1, 1], [9, 13], [[0, 2, 4, 6], [1, 3, 5, 7]], 4)
    alone = AttentionBatch.make([1], [13], [[1, 3, 5, 7]], 4)
    out = paged_attention(q, cache.k[0], cache.v[0], together, SCALE)
    assert out.dtype is torch.bfloat16
    assert torch.equal(out[1:], paged_attention(q[1:], cache.k[0], cache.v[0], alone, SCALE))


def test_block_pool_keeps_its_books():
    pool = BlockPool(num_blocks=4, block_size=16)
    assert (pool.num_tokens, pool.blocks_for(0), pool.blocks_for(16), pool.blocks_for(17)) == (64, 0, 1, 2)
    first, second = pool.allocate(1), pool.allocate(3)
    assert sorted(first + second) == [0, 1, 2, 3]
    with pytest.raises(MemoryError, match="1 KV blocks asked for, 0 of 4 are free"):
        pool.allocate(1)
    pool.free(second)
    assert pool.num_free == 3
    with pytest.raises(ValueError, match=f"KV block {second[-1]} freed but not allocated"):
        pool.free(second)
