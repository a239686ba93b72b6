"""The digest and the hashes of `matrix/digest.py` against a definition in plain integers, and the vectors made of them."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.vectors import make
from matrix import digest as cd

VECTORS = Path(make.__file__).parent


def plain_digest(data: bytes) -> str:
    """SPEC.md section 3, word by word."""
    constants = (
        (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0xD6E8FEB86659FD93),
        (0xC2B2AE3D27D4EB4F, 0x94D049BB133111EB, 0xA0761D6478BD642F),
    )
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
    out = "cd1:"
    for a, b, c in constants:
        s = len(data) * a
        for i, word in enumerate(words):
            z1 = (word + (i + 1) * a) * b % 2**64
            z2 = z1 ^ z1 >> 32
            z3 = z2 * c % 2**64
            s += z3 ^ z3 >> 29
        s %= 2**64
        f2 = (s ^ s >> 33) * 0xFF51AFD7ED558CCD % 2**64
        out += f"{f2 ^ f2 >> 33:016x}"
    return out


def as_array(data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.uint8)


@given(st.binary(max_size=200))
def test_digest_equals_the_plain_definition(data: bytes) -> None:
    assert cd.digest(as_array(data)) == plain_digest(data)


def test_digest_equals_the_plain_definition_over_several_chunks() -> None:
    data = np.random.default_rng(0).integers(0, 256, cd.CHUNK_WORDS * 8 * 2 + 11, np.uint8).tobytes()
    assert cd.digest(as_array(data)) == plain_digest(data)


@given(st.binary(min_size=8, max_size=400), st.data())
def test_blocks_in_any_order_add_up(data: bytes, draw: st.DataObject) -> None:
    words = as_array(data[: len(data) // 8 * 8]).view("<u8")
    cuts = sorted(draw.draw(st.sets(st.integers(0, words.size))) | {0, words.size})
    blocks = draw.draw(st.permutations(list(itertools.pairwise(cuts))))
    sums = [cd.lane_sums(words[a:b], first=a) for a, b in blocks]
    total = (sum(s[0] for s in sums) & cd.MASK, sum(s[1] for s in sums) & cd.MASK)
    assert cd.finish(total, words.size * 8) == cd.digest(words)


@given(st.binary(min_size=2, max_size=64), st.data())
def test_order_length_and_each_bit_matter(data: bytes, draw: st.DataObject) -> None:
    whole = cd.digest(as_array(data))
    bit = draw.draw(st.integers(0, len(data) * 8 - 1))
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    assert cd.digest(as_array(bytes(flipped))) != whole
    assert cd.digest(as_array(data + b"\0")) != whole
    words = [data[i : i + 8] for i in range(0, len(data), 8)]
    shuffled = b"".join(draw.draw(st.permutations(words)))
    assert (cd.digest(as_array(shuffled)) == whole) == (shuffled == data)


def test_elements_are_taken_row_major_and_little_endian() -> None:
    array = np.arange(24, dtype="<f4").reshape(4, 6)
    expected = plain_digest(array.tobytes())
    assert cd.digest(array) == expected
    assert cd.digest(array.astype(">f4")) == expected
    assert cd.digest(np.asfortranarray(array)) == expected
    assert cd.digest(array[:, ::2]) == plain_digest(array[:, ::2].copy().tobytes())
    assert cd.digest(array.reshape(-1)) == expected, "the shape is not part of the digest"
    assert cd.digest(np.array(7, "<u2")) == plain_digest(b"\7\0"), "a scalar has one element"


def test_sample_of_a_large_tensor_is_three_parts() -> None:
    data = as_array(make.content((131, 7, 20_001)))
    parts = data[:4096].tobytes() + data[10_000:14_096].tobytes() + data[-4096:].tobytes()
    assert cd.sample_digest(data) == plain_digest(parts)


def blake(tag: str, text: str) -> str:
    return f"{tag}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def test_layout_hash_is_the_hash_of_the_text_that_the_specification_gives() -> None:
    rope = {"op": "rope", "base": 10000.0, "head_dim": 2, "max_position": 8}
    parameter = {"dtype": "float32", "kind": "parameter", "alias": None, "transform": {"op": "copy"}, "sources": []}
    tensors = [
        {"name": "z", "dtype": "float32", "shape": [8, 2], "stride": [2, 1], "kind": "derived", "alias": None}
        | {"transform": rope, "sources": []},
        {"name": "é", "shape": [3], "stride": [1], **parameter}
        | {"sources": [{"tensor": "t", "start": [1], "stop": [4], "at": [0]}]},
    ]
    text = (
        '{"experts":{"10":[2,0],"9":[1]},"format":1,"tensors":['
        '{"alias":null,"dtype":"float32","kind":"derived","name":"z","shape":[8,2],"sources":[],"stride":[2,1],'
        '"transform":{"base":10000.0,"head_dim":2,"max_position":8,"op":"rope"}},'
        '{"alias":null,"dtype":"float32","kind":"parameter","name":"é","shape":[3],'
        '"sources":[{"at":[0],"start":[1],"stop":[4],"tensor":"t"}],"stride":[1],"transform":{"op":"copy"}}]}'
    )
    assert cd.layout_hash(tensors, {10: [2, 0], 9: [1]}) == blake("lh1", text)
    assert cd.layout_hash(tensors[::-1], {9: [1], 10: [2, 0]}) == blake("lh1", text)
    assert cd.layout_hash(tensors, {10: [0, 2], 9: [1]}) != blake("lh1", text)


def test_fingerprint_and_key_are_hashes_of_the_texts_that_the_specification_gives() -> None:
    fingerprint = cd.checkpoint_fingerprint({"b": ("float32", (2, 3), "cd1:x"), "a": ("bfloat16", (), "cd1:y")})
    assert fingerprint == blake("ck1", '{"a":["bfloat16",[],"cd1:y"],"b":["float32",[2,3],"cd1:x"]}')
    text = '{"checkpoint":"ck1:c","layout":"lh1:l","post_processing":3}'
    assert cd.cache_key("ck1:c", "lh1:l", 3) == blake("wk1", text)


def test_canonical_json_refuses_what_json_cannot_say() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        cd.canonical_json({"base": float("nan")})


@pytest.mark.parametrize(
    ("file", "vectors"), [("digest.json", make.digest_vectors), ("layout_hash.json", make.layout_vectors)]
)
def test_vector_files_are_what_their_maker_makes(file: str, vectors: object) -> None:
    assert callable(vectors)
    assert (VECTORS / file).read_text() == make.text(vectors()), "run: python -m conformance.vectors.make"


def test_digest_vectors_hold_by_the_plain_definition() -> None:
    cases = json.loads((VECTORS / "digest.json").read_text())["cases"]
    assert len({case["digest"] for case in cases}) == len(cases) > 10
    for case in cases:
        described = case["bytes"]
        data = make.content(described.get("hex", tuple(described.values())))
        assert plain_digest(data) == case["digest"], case["name"]
        middle = len(data) // 2
        sampled = data if len(data) <= 12288 else data[:4096] + data[middle : middle + 4096] + data[-4096:]
        assert plain_digest(sampled) == case["sample"], case["name"]


def test_layout_vectors_hold_by_the_text_that_is_hashed() -> None:
    vectors = json.loads((VECTORS / "layout_hash.json").read_text())
    assert len({case["layout_hash"] for case in vectors["cases"]}) == len(vectors["cases"])
    for case in vectors["cases"]:
        assert blake("lh1", case["canonical_json"]) == case["layout_hash"], case["name"]
        told = json.loads(case["canonical_json"])
        assert told == {
            "format": 1,
            "experts": case["experts"],
            "tensors": sorted(case["tensors"], key=lambda one: one["name"]),
        }
    for key in vectors["keys"]:
        text = f'{{"checkpoint":"{key["checkpoint"]}","layout":"{key["layout"]}","post_processing":{key["post_processing"]}}}'
        assert blake("wk1", text) == key["key"]
