"""The digest in torch against plain integer arithmetic, and the fingerprint: sound, spread-independent, read once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import conformance.vectors
from conformance.selftest import tiny
from reference.cache.digest import digest, digest_slots
from reference.cache.key import derive_key
from reference.errors import CheckpointRefusal
from reference.weights import fingerprint as fingerprints
from reference.weights.checkpoint import Checkpoint
from reference.weights.fingerprint import compute_digests, fingerprint, known_digests, sample

MASK = (1 << 64) - 1
A = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)
B = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
C = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
BLOCK = 8 * (1 << 15)  # bytes that the implementation handles at once
DTYPES = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool)


def plain_digest(data: bytes) -> str:
    """SPEC section 3, word by word."""
    padded = data + bytes(-len(data) % 8)
    lanes = []
    for a, b, c in zip(A, B, C, strict=True):
        s = len(data) * a
        for i in range(len(padded) // 8):
            z = (int.from_bytes(padded[8 * i : 8 * i + 8], "little") + (i + 1) * a) * b & MASK
            z = (z ^ z >> 32) * c & MASK
            s += z ^ z >> 29
        s &= MASK
        f = (s ^ s >> 33) * 0xFF51AFD7ED558CCD & MASK
        lanes.append(f ^ f >> 33)
    return "cd1:" + "".join(f"{lane:016x}" for lane in lanes)


def tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def pattern(count: int, seed: int) -> bytes:
    return hashlib.shake_128(seed.to_bytes(8, "little")).digest(count)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 5000), st.integers(0, 1 << 60), st.integers(0, 16))
@example(BLOCK, 1, 0)
@example(BLOCK + 8, 2, 0)
@example(3 * BLOCK - 3, 3, 5)
@example(0, 0, 0)
@example(0, 0, 3)
def test_digest_of_any_length_at_any_address(count: int, seed: int, start: int) -> None:
    """A view into a buffer that does not start on a word, several blocks, and a last word that is not full."""
    data = pattern(count, seed)
    expected = plain_digest(data)
    assert digest(tensor_of(data)) == expected
    around = tensor_of(b"\xaa" * start + data + b"\xbb" * 9)
    assert digest(around[start : start + count]) == expected
    # A tensor of its own over an address off a word, as of a shard, and a view of that which is back on one.
    if count > start:
        off = torch.frombuffer(bytearray(b"\xaa" * start + data), dtype=torch.uint8, offset=start)
        assert digest(off[-start % 8 :]) == plain_digest(data[-start % 8 :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(0, 5), max_size=4), seed=st.integers(0, 1 << 60))
def test_digest_is_over_little_endian_row_major_elements(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    data = bytes(b & 1 for b in pattern(count, seed)) if dtype == torch.bool else pattern(count, seed)
    tensor = tensor_of(data).view(dtype).view(shape)
    assert digest(tensor) == plain_digest(data)
    assert digest(tensor.unsqueeze(0)) == plain_digest(data)


def test_digest_depends_on_order_length_and_every_bit() -> None:
    data = bytearray(pattern(64, 1))
    seen = {plain_digest(data), plain_digest(data[8:16] + data[:8] + data[16:]), plain_digest(data + b"\0")}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(tensor_of(data)))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 3 + 8 * len(data)


def test_slots_have_digests_of_their_own() -> None:
    """Each over its own elements, so that a slot's digest moves with its expert; none of them starts on a word here."""
    stacked = torch.randn(5, 3, 3).to(torch.bfloat16)
    digests = digest_slots(stacked, stacked=True)
    assert digests == [digest(expert.clone()) for expert in stacked]
    assert digest_slots(stacked[[4, 3, 2, 1, 0]], stacked=True) == digests[::-1]
    assert digest_slots(stacked, stacked=False) == [digest(stacked)]
    assert digest_slots(stacked[:0], stacked=True) == []


def vectors(name: str) -> list[dict[str, Any]]:
    path = Path(conformance.vectors.__file__).parent / f"{name}.json"
    return list(json.loads(path.read_text())["cases"])


@pytest.mark.parametrize("case", vectors("digest"), ids=lambda case: case["name"])
def test_digest_vectors(case: dict[str, Any]) -> None:
    given_ = case["bytes"]
    data = (
        bytes.fromhex(given_["hex"])
        if "hex" in given_
        else bytes((i * given_["multiply"] + given_["add"]) % 256 for i in range(given_["count"]))
    )
    assert digest(tensor_of(data)) == case["digest"]
    assert sample(tensor_of(data)) == case["sample"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    (tmp_path / "digests").mkdir()
    return tmp_path / "digests"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the shard files that are read to be digested, each after the clock tick of its last change."""
    files: list[str] = []
    digest_shard = fingerprints._digest_shard

    def count(store: Path, shard: Any) -> Any:
        # A second change within one tick would leave the identity as it is, so nothing is read in that tick.
        assert time.time_ns() >= shard.identity.ctime_ns + 10_000_000
        files.append(shard.path.name)
        return digest_shard(store, shard)

    monkeypatch.setattr(fingerprints, "_digest_shard", count)
    return files


def compute(directory: Path, store: Path) -> str:
    return fingerprint(compute_digests(Checkpoint.open(directory), store, 0, lambda done, total: None))


def test_fingerprint_is_of_content_not_of_files(tmp_path: Path, store: Path) -> None:
    tensors = tiny.make_tensors(tiny.SPARSE)
    one = compute(tiny.write(tmp_path / "one", tiny.SPARSE, tensors), store)
    assert compute(tiny.write(tmp_path / "many", tiny.SPARSE, tensors, shards=5), store) == one
    document = {name: ["bfloat16", list(t.shape), digest(t)] for name, t in tensors.items()}
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    assert one == "ck1:" + hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    key = json.dumps({"checkpoint": one, "layout": "lh1:0", "post_processing": 1}, separators=(",", ":"))
    assert derive_key(one, "lh1:0") == "wk1:" + hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def test_fingerprint_changes_with_one_byte_name_or_dtype(tmp_path: Path, store: Path) -> None:
    tensors = tiny.make_tensors(tiny.DENSE)
    name = "model.layers.1.mlp.up_proj.weight"
    flipped = tensors[name].clone()
    flipped.view(torch.uint8)[-1, -1] ^= 1
    renamed = {("x" if n == name else n): t for n, t in tensors.items()}
    variants = [
        tensors,
        tensors | {name: flipped},
        renamed,
        tensors | {name: tensors[name].view(torch.float16)},
        tensors | {name: tensors[name].view(16, 24)},
    ]
    found = [compute(tiny.write(tmp_path / str(i), tiny.DENSE, of), store) for i, of in enumerate(variants)]
    assert len(set(found)) == len(variants)


def test_known_files_are_not_read_again_and_a_copy_is_read_once(tmp_path: Path, store: Path, read: list[str]) -> None:
    directory = tiny.write(tmp_path / "model", tiny.DENSE, shards=3)
    assert known_digests(Checkpoint.open(directory), store) is None
    first = compute(directory, store)
    assert len(read) == 3
    assert compute(directory, store) == first
    (tmp_path / "link").symlink_to(directory)
    assert fingerprint(known_digests(Checkpoint.open(tmp_path / "link"), store) or {}) == first
    assert len(read) == 3
    copy = shutil.copytree(directory, tmp_path / "copy")
    assert known_digests(Checkpoint.open(copy), store) is None
    assert [compute(copy, store), compute(copy, store)] == [first, first]
    assert len(read) == 6
    assert [path for path in store.iterdir() if path.suffix != ".json"] == []


def test_content_replaced_in_place_is_read_anew(tmp_path: Path, store: Path, read: list[str]) -> None:
    """Same path, same size, same headers, and even the same modification time: the identity knows."""
    directory = tiny.write(tmp_path / "model", tiny.DENSE, shards=3)
    first = compute(directory, store)
    shard = tiny.shard_with(directory, "model.norm.weight")
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compute(directory, store) != first
    assert read[3:] == [shard.name]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"identity": 1, "tensors": {}}'])
def test_torn_memory_of_a_file_is_not_believed(tmp_path: Path, store: Path, read: list[str], content: bytes) -> None:
    directory = tiny.write(tmp_path / "model", tiny.DENSE)
    first = compute(directory, store)
    (record,) = store.glob("*.json")
    record.write_bytes(content)
    assert compute(directory, store) == first
    assert len(read) == 2


def test_file_that_changes_while_it_is_digested_is_refused(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tiny.write(tmp_path / "model", tiny.DENSE)
    checkpoint = Checkpoint.open(directory)

    def sample_and_replace(tensor: torch.Tensor) -> str:
        tiny.write(tmp_path / "new", tiny.DENSE)
        (tmp_path / "new" / tiny.SINGLE).replace(directory / tiny.SINGLE)
        return sample(tensor)

    monkeypatch.setattr(fingerprints, "sample", sample_and_replace)
    with pytest.raises(CheckpointRefusal, match="changed while it was read"):
        compute_digests(checkpoint, store, 0, lambda done, total: None)
    assert list(store.iterdir()) == []


def test_progress_ends_with_all_bytes_from_any_first_shard(tmp_path: Path, store: Path) -> None:
    directory = tiny.write(tmp_path / "model", tiny.DENSE, shards=3)
    for first in range(5):
        told: list[tuple[int, int]] = []
        compute_digests(Checkpoint.open(directory), store, first, lambda *step, told=told: told.append(step))
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] == sum(p.stat().st_size for p in directory.glob("*.safetensors"))
