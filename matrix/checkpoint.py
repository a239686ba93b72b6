"""Hugging Face checkpoints as they lie on disk: configuration, shards and safetensors headers, mapped, not loaded."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from matrix.digest import checkpoint_fingerprint, digest
from matrix.dtype import SAFETENSORS, STORAGE, Array

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: The largest header that the safetensors format allows, in bytes.
MAX_HEADER = 100_000_000


class CheckpointError(ValueError):
    """A checkpoint that is incomplete, torn, or contradicts itself; the text is one line with file and tensor."""


@dataclass(frozen=True)
class CheckpointTensor:
    """One stored tensor. `dtype` is `bfloat16`, `float16` or `float32`; `offset` in bytes from the file's start."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * STORAGE[self.dtype].itemsize

    def map(self) -> Array:
        """Return its elements, read-only, in the storage of `matrix.dtype`; pages are read as they are touched."""
        if not self.nbytes:
            return np.empty(self.shape, STORAGE[self.dtype])
        return np.memmap(self.file, STORAGE[self.dtype], "r", offset=self.offset, shape=self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's configuration (the content of `config.json`) and its tensors by name."""

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, CheckpointTensor]

    @cached_property
    def fingerprint(self) -> str:
        """`ck1:` + 32 hex digits over every tensor's bytes. Reads them all, once."""
        return checkpoint_fingerprint({n: (t.dtype, t.shape, digest(t.map())) for n, t in self.tensors.items()})


def read_checkpoint(directory: str | Path) -> Checkpoint:
    """Read a checkpoint's configuration and its shards' headers.

    The shards are those that the index names, or `model.safetensors` where there is no index. Raises `CheckpointError`.
    """
    directory = Path(directory)
    config = _read_json(directory / "config.json")
    index_path = directory / INDEX
    if not index_path.exists():
        return Checkpoint(directory, config, {t.name: t for t in _read_header(directory / SINGLE)})
    weight_map = _read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: has no weight_map of tensor names to shards")
    tensors: dict[str, CheckpointTensor] = {}
    for shard in sorted(set(map(str, weight_map.values()))):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: shard {shard!r} is not the name of a file in that directory")
        for tensor in _read_header(directory / shard):
            if weight_map.get(tensor.name) != shard:
                stated = weight_map.get(tensor.name, "no shard")
                raise CheckpointError(f"{tensor.file}: holds {tensor.name}, which the index puts in {stated}")
            tensors[tensor.name] = tensor
    if missing := sorted(weight_map.keys() - tensors.keys()):
        raise CheckpointError(f"{directory / weight_map[missing[0]]}: lacks {missing[0]}, which the index puts there")
    return Checkpoint(directory, config, tensors)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a JSON {type(content).__name__}, not an object")
    return content


def _read_header(path: Path) -> Iterator[CheckpointTensor]:
    """Yield the tensors of one safetensors file, in the order of their bytes; they must fill it without gap or overlap."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER):
                raise CheckpointError(f"{path}: its header of {length} bytes does not fit its {size} bytes")
            header = json.loads(file.read(length))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise (
            error if isinstance(error, CheckpointError) else CheckpointError(f"{path}: bad header: {error}")
        ) from error
    start = 8 + length
    try:
        header.pop("__metadata__", None)
        entries = sorted((*map(int, entry["data_offsets"]), name, entry) for name, entry in header.items())
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: bad header: {error!r}") from error
    position = 0
    for begin, end, name, entry in entries:
        tensor = CheckpointTensor(name, _dtype(path, name, entry), _shape(path, name, entry), path, start + begin)
        if begin != position or end - begin != tensor.nbytes:
            raise CheckpointError(
                f"{path}: {name}: data_offsets [{begin}, {end}] do not fit {tensor.dtype} {list(tensor.shape)}"
                f" at {position}"
            )
        position = end
        yield tensor
    if start + position != size:
        raise CheckpointError(f"{path}: has {size} bytes, but its header describes {start + position}")


def _dtype(path: Path, name: str, entry: Mapping[str, Any]) -> str:
    given = entry.get("dtype")
    if given not in SAFETENSORS:
        raise CheckpointError(f"{path}: {name}: dtype {given!r} is none of {', '.join(SAFETENSORS)}")
    return SAFETENSORS[given]


def _shape(path: Path, name: str, entry: Mapping[str, Any]) -> tuple[int, ...]:
    shape = entry.get("shape")
    if not isinstance(shape, list) or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise CheckpointError(f"{path}: {name}: shape {shape!r} is not a list of sizes")
    return tuple(shape)
