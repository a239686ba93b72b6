"""Element types: their names, how numpy stores them, and conversion between them, rounding to nearest even."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: How numpy stores each type; it has no bfloat16, whose bits are kept in uint16.
STORAGE: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
    "float32": np.dtype("<f4"),
}
#: The names that safetensors headers use.
SAFETENSORS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


def cast(array: Array, source: str, target: str) -> Array:
    """Return an array of type `source` as type `target`, in the storage of each.

    Rounds to nearest, ties to even; what is too large becomes infinite. NaN becomes the quiet NaN 0x7fc0 in bfloat16.
    """
    if source == target:
        return array
    wide = _widen_bfloat16(array) if source == "bfloat16" else array.astype(np.float32)
    if target == "bfloat16":
        return _narrow_to_bfloat16(wide)
    with np.errstate(over="ignore"):
        return wide.astype(STORAGE[target])


def _widen_bfloat16(bits: Array) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def _narrow_to_bfloat16(array: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Add half of the last kept place, less one where that place is even, and drop the rest: nearest, ties to even."""
    bits = np.ascontiguousarray(array).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(array), 0x7FC0, rounded).astype(np.uint16)
