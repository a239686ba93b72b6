"""Write the vectors of digests and hashes: `python -m conformance.vectors.make`.

They say what `SPEC.md` sections 2 to 4 mean, for an implementation in any language. The values come from `matrix/digest.py`;
`selftest/test_matrix_digest.py` recomputes them by plain integer arithmetic and fails where a file isn't what this makes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from matrix.digest import cache_key, canonical_json, checkpoint_fingerprint, digest, layout_hash, sample_digest

HERE = Path(__file__).parent

#: Contents by name: a hex string, or (multiply, add, count): `count` bytes, byte `i` being `(i * multiply + add) mod 256`.
CONTENTS: Mapping[str, str | tuple[int, int, int]] = {
    "empty": "",
    "one zero byte": "00",
    "one zero word": "0000000000000000",
    "one byte": "01",
    "one word": "0102030405060708",
    "all bits of a word": "ffffffffffffffff",
    "padded to two words": "010203040506070809",
    "two words": "01000000000000000200000000000000",
    "the same two words, swapped": "02000000000000000100000000000000",
    "float32 1.0, -2.0, 0.5": "0000803f000000c00000003f",
    "bfloat16 1.0, -2.0, 0.5": "803f00c0003f",
    "12 KiB, the largest whole sample": (131, 7, 12288),
    "12 KiB and a byte, the smallest cut sample": (131, 7, 12289),
    "long": (167, 13, 300_001),
}


def content(of: str | tuple[int, int, int]) -> bytes:
    """Return the bytes that a case describes."""
    if isinstance(of, str):
        return bytes.fromhex(of)
    multiply, add, count = of
    return bytes((i * multiply + add) % 256 for i in range(count))


def digest_vectors() -> dict[str, Any]:
    """Return the content of `digest.json`."""
    cases = []
    for name, of in CONTENTS.items():
        data = np.frombuffer(content(of), np.uint8)
        given = {"hex": of} if isinstance(of, str) else dict(zip(("multiply", "add", "count"), of, strict=True))
        cases.append({"name": name, "bytes": given, "digest": digest(data), "sample": sample_digest(data)})
    return {
        "about": "SPEC.md sections 3 (digest) and 6 (sample). `bytes` is a hex string, or byte i = (i * multiply + add) mod"
        " 256 for i < count.",
        "cases": cases,
    }


def tensor(name: str, shape: Sequence[int], dtype: str = "bfloat16", **fields: Any) -> dict[str, Any]:
    """Return one tensor of a layout, contiguous; a parameter copied from nowhere unless `fields` say otherwise."""
    stride = [int(np.prod(shape[axis + 1 :], dtype=int)) for axis in range(len(shape))]
    whole: dict[str, Any] = {"kind": "parameter", "alias": None, "transform": {"op": "copy"}, "sources": []}
    return {"name": name, "dtype": dtype, "shape": list(shape), "stride": stride, **whole, **fields}


def source(name: str, start: Sequence[int], stop: Sequence[int], at: Sequence[int]) -> dict[str, Any]:
    """Return one source slice."""
    return {"tensor": name, "start": list(start), "stop": list(stop), "at": list(at)}


def layouts() -> dict[str, tuple[list[dict[str, Any]], dict[int, list[int]]]]:
    """Return the tensors (in an order that must not matter) and the expert slots of each layout case."""
    embedding = tensor("model.embed_tokens.weight", [64, 4], sources=[source("embed", [64, 0], [100, 4], [0, 0])])
    rope = {"op": "rope", "base": 10000.0, "head_dim": 2, "max_position": 8}
    gate_up = [source(f"{e}.{part}", [0, 0], [2, 4], [e, row, 0]) for e in (0, 1) for part, row in (("g", 0), ("u", 2))]
    swapped = [
        source(f"{1 - e}.{part}", [0, 0], [2, 4], [e, row, 0]) for e in (0, 1) for part, row in (("g", 0), ("u", 2))
    ]
    return {
        "nothing": ([], {}),
        "second rank of a padded vocabulary": ([embedding], {}),
        "alias": (
            [tensor("lm_head.weight", [64, 4], alias=embedding["name"], transform={"op": "alias"}), embedding],
            {},
        ),
        "derived": ([tensor("rope", [8, 2], "float32", kind="derived", transform=rope)], {}),
        "derived, base a million": (
            [tensor("rope", [8, 2], "float32", kind="derived", transform=rope | {"base": 1e6})],
            {},
        ),
        "cast": (
            [tensor("norm", [4], transform={"op": "cast", "from": "float32"}, sources=[source("norm", [0], [4], [0])])],
            {},
        ),
        "experts": ([tensor("w13_weight", [2, 4, 4], sources=gate_up)], {3: [0, 1]}),
        "experts swapped": ([tensor("w13_weight", [2, 4, 4], sources=swapped)], {3: [1, 0]}),
        "layers 2 and 10, a name beyond ASCII": ([tensor("ü\n", [1]), tensor("a", [1, 1])], {2: [0], 10: [0]}),
    }


def layout_vectors() -> dict[str, Any]:
    """Return the content of `layout_hash.json`."""
    cases = []
    for name, (tensors, experts) in layouts().items():
        hashed = {
            "format": 1,
            "experts": {str(layer): slots for layer, slots in experts.items()},
            "tensors": sorted(tensors, key=lambda one: str(one["name"])),
        }
        given = {"tensors": tensors, "experts": hashed["experts"]}
        text = canonical_json(hashed).decode()
        cases.append({"name": name, **given, "canonical_json": text, "layout_hash": layout_hash(tensors, experts)})
    stored = {
        "norm": ("float32", [3], digest(np.array([1, -2, 0.5], "<f4"))),
        "bias": ("bfloat16", [], digest(np.array(0x3F80, "<u2"))),
    }
    fingerprint = checkpoint_fingerprint(stored)
    layout = layout_hash(*layouts()["experts"])
    return {
        "about": "SPEC.md sections 2 and 4. Tensors come in an order that must not matter; `canonical_json` is what is hashed.",
        "cases": cases,
        "fingerprints": [{"tensors": stored, "checkpoint": fingerprint}],
        "keys": [
            {
                "checkpoint": fingerprint,
                "layout": layout,
                "post_processing": version,
                "key": cache_key(fingerprint, layout, version),
            }
            for version in (1, 2)
        ],
    }


def text(vectors: Mapping[str, Any]) -> str:
    """Return a file's text: ASCII, so that no editor changes it."""
    return json.dumps(vectors, indent=1) + "\n"


def main() -> None:
    (HERE / "digest.json").write_text(text(digest_vectors()))
    (HERE / "layout_hash.json").write_text(text(layout_vectors()))


if __name__ == "__main__":
    main()
