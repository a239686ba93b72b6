"""Hugging Face checkpoints on disk: the index, the safetensors headers, and memory-mapped tensors.

Opening reads headers only. Every claim of a header is checked against the file before any byte is believed. Format:
https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import warnings
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from reference.errors import CheckpointRefusal

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
# The format's own bound on a header.
_MAX_HEADER = 100_000_000


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as the layout hash spells it: `bfloat16`, `float32`."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class FileIdentity:
    """What tells one state of a file from another without reading it: device, inode, size, change times (ns)."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Return the identity of the file at `path`, links followed."""
        stat = path.stat()
        return cls(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a shard's header describes it. `start` and `stop` are byte positions in the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Shard:
    """One safetensors file, its header read and checked, its bytes mapped when first asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.identity = FileIdentity.of(path)
        self.tensors = {entry.name: entry for entry in _read_header(path, self.identity.size)}

    def changed(self) -> bool:
        """Say whether the file is not the one that was opened any more, or its content may be another."""
        try:
            return FileIdentity.of(self.path) != self.identity
        except OSError:
            return True

    @cached_property
    def _map(self) -> mmap.mmap:
        with self.path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def view(self, name: str) -> torch.Tensor:
        """Return a tensor over the mapped file: no byte is read until it is used, none may be written."""
        entry = self.tensors[name]
        count = math.prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            flat = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.start)
        return flat.view(entry.shape)


class Checkpoint:
    """A checkpoint directory: its configuration, its shards and where each tensor is."""

    def __init__(self, path: Path, config: dict[str, Any], shards: tuple[Shard, ...]) -> None:
        self.path = path
        self.config = config
        self.shards = shards
        self.shard_of = {name: shard for shard in shards for name in shard.tensors}

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read configuration, index and headers. Raises `CheckpointRefusal` for anything that does not add up."""
        path = Path(path)
        config = _read_json(path / "config.json", "the model's configuration")
        names, weight_map = _shard_names(path)
        shards = []
        for name in names:
            if not (path / name).is_file():
                where = _INDEX if weight_map else _SINGLE
                raise CheckpointRefusal(f"{path / name}: shard named by {where} is not there; complete the checkpoint")
            shards.append(Shard(path / name))
        owner: dict[str, str] = {}
        for shard in shards:
            for tensor in shard.tensors:
                if tensor in owner:
                    raise CheckpointRefusal(
                        f"{shard.path}: tensor {tensor} is also in {owner[tensor]}; keep one of them"
                    )
                owner[tensor] = shard.path.name
        for tensor, name in (weight_map or {}).items():
            if owner.get(tensor) != name:
                found = f"in {owner[tensor]}" if tensor in owner else "in no shard"
                raise CheckpointRefusal(f"{path / _INDEX}: says tensor {tensor} is in {name}, but it is {found}")
        return cls(path, config, tuple(shards))

    def entry(self, name: str) -> TensorEntry:
        """Return a tensor's header entry. Raises `CheckpointRefusal` where the checkpoint lacks it."""
        shard = self.shard_of.get(name)
        if shard is None:
            raise CheckpointRefusal(f"{self.path}: tensor {name} is missing; the model needs it")
        return shard.tensors[name]

    def check_unchanged(self) -> None:
        """Raise `CheckpointRefusal` where a shard changed since it was opened: what was read of it may be of two minds."""
        for shard in self.shards:
            if shard.changed():
                raise CheckpointRefusal(f"{shard.path}: changed while it was read; start again when it is complete")

    def view(self, name: str) -> torch.Tensor:
        """Return a read-only tensor over the mapped shard that holds `name`."""
        self.entry(name)
        return self.shard_of[name].view(name)


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        value = _parse_json(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointRefusal(
            f"{path}: {what} is not there; give the directory of a Hugging Face checkpoint"
        ) from None
    except OSError as error:
        raise CheckpointRefusal(f"{path}: {what} can't be read ({error.strerror})") from None
    except ValueError as error:
        raise CheckpointRefusal(
            f"{path}: {what} is not valid JSON ({error}); the file is torn or not a checkpoint's"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointRefusal(f"{path}: {what} is a {type(value).__name__}, a JSON object is needed")
    return value


def _parse_json(data: bytes) -> Any:
    """Parse strictly: UTF-8, no key twice, no half of a surrogate pair. Raises ValueError."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value: dict[str, Any] = {}
        for key, item in pairs:
            if key in value:
                raise ValueError(f"key {key!r} is there twice")
            key.encode()
            value[key] = item
        return value

    try:
        return json.loads(data.decode(), object_pairs_hook=unique)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _shard_names(path: Path) -> tuple[list[str], dict[str, str] | None]:
    if (path / _INDEX).exists():
        weight_map = _read_json(path / _INDEX, "the index of shards").get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointRefusal(f"{path / _INDEX}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
        outside = [name for name in names if os.path.basename(name) != name]
        if outside:
            raise CheckpointRefusal(f"{path / _INDEX}: shard {outside[0]!r} lies outside the checkpoint's directory")
        return names, weight_map
    if (path / _SINGLE).exists():
        return [_SINGLE], None
    raise CheckpointRefusal(f"{path}: has neither {_INDEX} nor {_SINGLE}; only safetensors checkpoints are read")


def _read_header(path: Path, size: int) -> list[TensorEntry]:
    try:
        with path.open("rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise CheckpointRefusal(
                    f"{path}: {len(head)} bytes are too few for a header's length; the file is torn"
                )
            (length,) = struct.unpack("<Q", head)
            if not 0 < length <= min(_MAX_HEADER, size - 8):
                raise CheckpointRefusal(
                    f"{path}: {size} bytes can't hold the header of {length} bytes that they announce (at most"
                    f" {_MAX_HEADER} are allowed); the file is torn"
                )
            raw = file.read(length)
    except OSError as error:
        raise CheckpointRefusal(f"{path}: shard can't be read ({error.strerror})") from None
    try:
        header = _parse_json(raw)
    except ValueError as error:
        raise CheckpointRefusal(f"{path}: header is not valid JSON ({error}); the file is torn") from None
    if not isinstance(header, dict):
        raise CheckpointRefusal(f"{path}: header is not a JSON object; the file is not safetensors")
    header.pop("__metadata__", None)
    entries = [_read_entry(path, name, claim, 8 + length) for name, claim in header.items()]
    # The format leaves no holes, so every byte belongs to one tensor and the last one ends the file.
    position = 8 + length
    for entry in sorted(entries, key=lambda e: (e.start, e.stop)):
        if entry.start != position:
            raise CheckpointRefusal(
                f"{path}: tensor {entry.name} starts at byte {entry.start}, but {position} is the next free one"
            )
        position = entry.stop
    if position != size:
        raise CheckpointRefusal(f"{path}: header describes {position} bytes, the file has {size}; it is torn")
    return entries


def _read_entry(path: Path, name: str, claim: Any, base: int) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = DTYPES[claim["dtype"]], tuple(claim["shape"]), claim["data_offsets"]
        if not all(type(n) is int and n >= 0 for n in (*shape, start, stop)):
            raise ValueError
    except (KeyError, TypeError, ValueError):
        raise CheckpointRefusal(
            f"{path}: header entry of tensor {name} is malformed or of an unknown dtype: {claim}"
        ) from None
    needed = math.prod(shape) * dtype.itemsize
    if stop - start != needed:
        raise CheckpointRefusal(
            f"{path}: tensor {name} {list(shape)} {claim['dtype']} needs {needed} bytes, its offsets give {stop - start}"
        )
    return TensorEntry(name, dtype, shape, base + start, base + stop)
