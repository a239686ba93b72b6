"""The digest `cd1` and the canonical JSON hashes, in plain numpy: the definition that other versions must equal bit for bit.

They guard against mistakes and corruption, not against an attacker. Source: `conformance/SPEC.md` sections 2, 3, 4.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

A = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
B = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
C = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
F = 0xFF51AFD7ED558CCD
MASK = 2**64 - 1

#: Words hashed at a time: small enough for intermediate arrays to stay in a core's cache.
CHUNK_WORDS = 1 << 15
#: Bytes of each part of a sample, and the size up to which a sample is the whole tensor.
SAMPLE_PART, SAMPLE_WHOLE = 4096, 3 * 4096

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def digest(array: npt.NDArray[Any]) -> str:
    """Return `cd1:` + 32 hex digits of an array's elements, in row-major order and as little-endian bytes.

    Any shape and dtype; bfloat16 is given as its bits in uint16. The shape itself isn't part of it.
    """
    data = little_endian_bytes(array)
    whole = data.size // 8 * 8
    lanes = lane_sums(data[:whole].view("<u8"))
    if data.size > whole:
        tail = np.zeros(8, np.uint8)
        tail[: data.size - whole] = data[whole:]
        last = lane_sums(tail.view("<u8"), first=whole // 8)
        lanes = (lanes[0] + last[0] & MASK, lanes[1] + last[1] & MASK)
    return finish(lanes, data.size)


def lane_sums(words: Words, first: int = 0) -> tuple[int, int]:
    """Return both lanes' sums of `mix` over a block of words, modulo 2^64.

    `first` is the index of the block's first word in the tensor. Blocks are independent: the sums of any division into
    blocks, taken in any order, add up to the tensor's.
    """
    sums = [0, 0]
    for start in range(0, words.size, CHUNK_WORDS):
        chunk = words[start : start + CHUNK_WORDS]
        index = np.arange(first + start + 1, first + start + 1 + chunk.size, dtype=np.uint64)
        for lane in (0, 1):
            z = (chunk + index * np.uint64(A[lane])) * np.uint64(B[lane])
            z ^= z >> np.uint64(32)
            z *= np.uint64(C[lane])
            z ^= z >> np.uint64(29)
            sums[lane] = sums[lane] + int(z.sum(dtype=np.uint64)) & MASK
    return sums[0], sums[1]


def finish(sums: tuple[int, int], size: int) -> str:
    """Return the digest of a tensor of `size` bytes whose words' lane sums are these."""
    lanes = []
    for lane in (0, 1):
        s = sums[lane] + size * A[lane] & MASK
        f = (s ^ s >> 33) * F & MASK
        lanes.append(f ^ f >> 33)
    return f"cd1:{lanes[0]:016x}{lanes[1]:016x}"


def sample_digest(array: npt.NDArray[Any]) -> str:
    """Return the digest of a checkpoint tensor's first, middle and last 4 KiB, or of all of it up to 12 KiB."""
    data = little_endian_bytes(array)
    if data.size > SAMPLE_WHOLE:
        middle = data.size // 2
        data = np.concatenate([data[:SAMPLE_PART], data[middle : middle + SAMPLE_PART], data[-SAMPLE_PART:]])
    return digest(data)


def little_endian_bytes(array: npt.NDArray[Any]) -> Bytes:
    """Return an array's elements in row-major order as bytes, `[size in bytes]`; a view where it can be one."""
    ordered = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return ordered.reshape(-1).view(np.uint8)


def canonical_json(value: Any) -> bytes:
    """Return sorted keys, no spaces, UTF-8, no escapes beyond JSON's own. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def tagged_hash(tag: str, value: Any) -> str:
    """Return `tag:` + 32 hex digits: BLAKE2b-128 of the value's canonical JSON."""
    return f"{tag}:{hashlib.blake2b(canonical_json(value), digest_size=16).hexdigest()}"


def layout_hash(tensors: Sequence[Mapping[str, Any]], experts: Mapping[int, Sequence[int]]) -> str:
    """Return `lh1:` + 32 hex digits of a rank's structure. No bytes of any tensor are read for it.

    `tensors`: maps of `name`, `dtype`, `shape`, `stride`, `kind`, `alias`, `transform`, `sources`, in any order; `experts`:
    the logical expert in each local slot, by layer.
    """
    return tagged_hash(
        "lh1",
        {
            "format": 1,
            "experts": {str(layer): list(slots) for layer, slots in experts.items()},
            "tensors": sorted(tensors, key=lambda tensor: str(tensor["name"])),
        },
    )


def checkpoint_fingerprint(tensors: Mapping[str, tuple[str, Sequence[int], str]]) -> str:
    """Return `ck1:` + 32 hex digits of a checkpoint: each tensor's dtype, shape and digest by name."""
    return tagged_hash("ck1", {name: [dtype, list(shape), value] for name, (dtype, shape, value) in tensors.items()})


def cache_key(checkpoint: str, layout: str, post_processing: int) -> str:
    """Return `wk1:` + 32 hex digits: what a daemon and an engine must agree on."""
    return tagged_hash("wk1", {"checkpoint": checkpoint, "layout": layout, "post_processing": post_processing})


def digests_digest(digests: Mapping[str, Sequence[str]]) -> str:
    """Return `dd1:` + 32 hex digits of all the digests of a rank, so that a ledger line stays short."""
    return tagged_hash("dd1", {name: list(values) for name, values in digests.items()})
