"""The KV pool: which blocks are whose, and the tensors behind them.

Block ids mean the same on every rank: rank 0 keeps the books (`BlockPool`), each rank holds its own heads (`KVCache`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from reference.kernels.attention import AttentionBatch, write_cache


class BlockPool:
    """Hands out block ids `0 .. num_blocks-1`, each of `block_size` tokens; the last one freed goes first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._used: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.num_blocks * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks that many tokens of one sequence take."""
        return -(-num_tokens // self.block_size)

    def allocate(self, count: int) -> list[int]:
        """Take `count` blocks. Raises `MemoryError`, and takes none, where fewer are free."""
        if count > len(self._free):
            raise MemoryError(f"{count} KV blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._used.update(taken)
        return taken

    def free(self, blocks: list[int]) -> None:
        """Give blocks back. Raises `ValueError` for one that is not allocated, since two owners would share it next."""
        for block in reversed(blocks):
            if block not in self._used:
                raise ValueError(f"KV block {block} freed but not allocated")
            self._used.remove(block)
            self._free.append(block)


@dataclass(frozen=True)
class KVCache:
    """A rank's keys and values. `k` and `v`: a tensor a layer, `[num_blocks, block_size, kv_heads, head_dim]`."""

    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> KVCache:
        """Allocate the pool's tensors, zeroed. `kv_heads` are this rank's."""
        shape = (num_blocks, block_size, kv_heads, head_dim)
        k, v = (tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)) for _ in "kv")
        return cls(k=k, v=v)

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self.k[0].shape[1]

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.k[0].device

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor, attention: AttentionBatch) -> None:
        """Store a layer's new keys and values, `[T, kv_heads, head_dim]`, at the batch's slots."""
        write_cache(self.k[layer], k, attention.slot_mapping)
        write_cache(self.v[layer], v, attention.slot_mapping)
