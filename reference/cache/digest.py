"""The digest of a tensor's bytes (`cd1`), in plain torch: two 64-bit lanes over mixed words, summed.

It guards against mistakes and corruption, not against an attacker. The definition is the suite's specification; this
computes the same bits, block by block, so that intermediate values stay in the processor's cache.
"""

from __future__ import annotations

import torch

_BLOCK = 1 << 15  # words
_MASK = (1 << 64) - 1
_A = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
_B = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_C = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
_F = 0xFF51AFD7ED558CCD


def _signed(value: int) -> int:
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_xor(z: torch.Tensor, bits: int, scratch: torch.Tensor) -> None:
    # int64 shifts keep the sign; the mask makes the shift a logical one.
    torch.bitwise_right_shift(z, bits, out=scratch).bitwise_and_((1 << (64 - bits)) - 1)
    z.bitwise_xor_(scratch)


def digest(tensor: torch.Tensor) -> str:
    """Return `cd1:` + 32 hex digits over a contiguous tensor's elements, row-major, as little-endian bytes."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    nbytes = data.numel()
    # Views into a slab start on a word; a slice of a shard may not, and is copied block by block then.
    aligned = nbytes == 0 or (data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0)
    whole = nbytes // 8
    sums = [0, 0]
    size = min(_BLOCK, max(1, whole))
    index = torch.arange(1, size + 1, dtype=torch.int64, device=data.device)
    steps = [index * _signed(a) for a in _A]
    z, scratch = torch.empty_like(index), torch.empty_like(index)
    for start in range(0, whole, size):
        count = min(size, whole - start)
        block = data[start * 8 : (start + count) * 8]
        words = (block if aligned else block.clone()).view(torch.int64)
        for lane in (0, 1):
            sums[lane] += _sum_block(words, steps[lane][:count], start * _A[lane], lane, z[:count], scratch[:count])
    if nbytes % 8:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[: nbytes % 8] = data[whole * 8 :]
        for lane in (0, 1):
            sums[lane] += _sum_block(
                tail.view(torch.int64), steps[lane][:1], whole * _A[lane], lane, z[:1], scratch[:1]
            )
    return "cd1:" + "".join(f"{_finish(total + nbytes * a):016x}" for total, a in zip(sums, _A, strict=True))


def digest_slots(tensor: torch.Tensor, stacked: bool) -> list[str]:
    """Return the digests of a tensor: one, or for stacked experts `[slots, ...]` one a slot."""
    return [digest(slot) for slot in tensor] if stacked else [digest(tensor)]


def _sum_block(
    words: torch.Tensor, steps: torch.Tensor, offset: int, lane: int, z: torch.Tensor, scratch: torch.Tensor
) -> int:
    torch.add(words, steps, out=z)
    z.add_(_signed(offset)).mul_(_signed(_B[lane]))
    _shift_xor(z, 32, scratch)
    z.mul_(_signed(_C[lane]))
    _shift_xor(z, 29, scratch)
    return int(z.sum().item())


def _finish(total: int) -> int:
    s = total & _MASK
    s ^= s >> 33
    s = s * _F & _MASK
    return s ^ (s >> 33)
