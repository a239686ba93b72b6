"""The fingerprint of a checkpoint's content: sound, since every byte counts, and cheap, since no file is read twice.

Digests are kept by file identity (device, inode, size, change times) in the registry's directory. A file with a known
identity is not read again; a copy of it is read once.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from filelock import FileLock

from reference.cache.digest import digest
from reference.errors import CheckpointRefusal
from reference.weights.checkpoint import Checkpoint, FileIdentity, Shard, dtype_name
from reference.weights.plan import hash_canonical_json

_SAMPLE = 4096  # bytes at the start, the middle and the end of a tensor
_CLOCK_TICK = 20_000_000  # ns; file systems stamp changes by a clock that stands still between timer interrupts


class TensorDigests(msgspec.Struct, frozen=True):
    """What is known of a checkpoint tensor's content: digest of all bytes, and of three samples."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    sample: str


class ShardRecord(msgspec.Struct, frozen=True):
    """The digests of one shard file, valid as long as the file has this identity."""

    identity: FileIdentity
    tensors: dict[str, TensorDigests]


def known_digests(checkpoint: Checkpoint, store: Path) -> dict[str, TensorDigests] | None:
    """Return every tensor's digests where all shard files were digested before, else None. Reads no shard."""
    found: dict[str, TensorDigests] = {}
    for shard in checkpoint.shards:
        record = _load(store, shard)
        if record is None:
            return None
        found |= record.tensors
    return found


def compute_digests(
    checkpoint: Checkpoint, store: Path, first: int, progress: Callable[[int, int], None]
) -> dict[str, TensorDigests]:
    """Return every tensor's digests, reading the shards that nobody has read before.

    Processes that do this at once divide the work: one reads a file, the others take its result. `first` is the shard
    to begin with, so that ranks begin apart. `progress` gets bytes done and in all. Raises `CheckpointRefusal` where a
    shard changes meanwhile.
    """
    _let_clock_pass(checkpoint)
    done, total = 0, sum(shard.identity.size for shard in checkpoint.shards)
    found: dict[str, TensorDigests] = {}
    shards = checkpoint.shards[first % len(checkpoint.shards) :] + checkpoint.shards[: first % len(checkpoint.shards)]
    for shard in shards:
        lock = _path(store, shard.identity).with_suffix(".lock")
        with FileLock(str(lock)):
            try:
                record = _load(store, shard) or _digest_shard(store, shard)
            finally:
                # Removed while held: whoever waits for it sees that the file is gone and makes a new one.
                lock.unlink(missing_ok=True)
        found |= record.tensors
        done += shard.identity.size
        progress(done, total)
    return found


def fingerprint(digests: dict[str, TensorDigests]) -> str:
    """Return `ck1:` + 32 hex digits over names, dtypes, shapes and digests of all tensors."""
    document = {name: [entry.dtype, list(entry.shape), entry.digest] for name, entry in digests.items()}
    return "ck1:" + hash_canonical_json(document)


def sample(tensor: torch.Tensor) -> str:
    """Return a digest over the first, middle and last 4 KiB of a tensor: enough to refuse early, not to accept."""
    data = tensor.reshape(-1).view(torch.uint8)
    n = data.numel()
    if n <= 3 * _SAMPLE:
        return digest(data)
    middle = n // 2
    return digest(torch.cat([data[:_SAMPLE], data[middle : middle + _SAMPLE], data[-_SAMPLE:]]))


def _path(store: Path, identity: FileIdentity) -> Path:
    name = hashlib.blake2b(msgspec.json.encode(identity), digest_size=16).hexdigest()
    return store / f"{name}.json"


def _load(store: Path, shard: Shard) -> ShardRecord | None:
    try:
        record = msgspec.json.decode(_path(store, shard.identity).read_bytes(), type=ShardRecord)
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    return record if record.identity == shard.identity and record.tensors.keys() == shard.tensors.keys() else None


def _digest_shard(store: Path, shard: Shard) -> ShardRecord:
    tensors = {}
    for name, entry in sorted(shard.tensors.items(), key=lambda item: item[1].start):
        view = shard.view(name)
        tensors[name] = TensorDigests(dtype_name(entry.dtype), entry.shape, digest(view), sample(view))
    record = ShardRecord(shard.identity, tensors)
    # A file that changed while it was read must neither be believed nor be remembered under its old identity.
    if shard.changed():
        raise CheckpointRefusal(f"{shard.path}: changed while it was read; start again when it is complete")
    path = _path(store, shard.identity)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        scratch.write_bytes(msgspec.json.encode(record))
        scratch.rename(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    return record


def _let_clock_pass(checkpoint: Checkpoint) -> None:
    # Two changes within one tick leave one identity. A file read in the tick of its last change could change once more
    # without a trace, so the tick is waited out first (as git does with its index).
    newest = max((shard.identity.ctime_ns for shard in checkpoint.shards), default=0)
    left = newest + _CLOCK_TICK - time.time_ns()
    if 0 < left <= _CLOCK_TICK:
        time.sleep(left / 1e9)
