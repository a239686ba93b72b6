"""The oracle and the reference derive the same thing by different code: layout hashes, digests, fingerprints and keys."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.selftest import tiny
from matrix.cell import Layout
from matrix.oracle import expected_ranks
from reference.cache.acquire import slab_digests
from reference.cache.key import derive_key
from reference.cache.transport import shm
from reference.models import build_model
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import fill_slab, slab_bytes
from reference.weights.fingerprint import compute_digests, fingerprint
from reference.weights.plan import POST_PROCESSING, plan_rank


def nothing(done: int, total: int) -> None:
    """Progress that nobody looks at."""


def compare(directory: Path, tp_size: int, dtype: str) -> None:
    """Hold every rank of the reference against the oracle."""
    for rank, expected in enumerate(expected_ranks(directory, Layout(tp=tp_size), dtype)):
        with tiny.rank(directory, tp_size, rank):
            checkpoint = Checkpoint.open(directory)
            plan = plan_rank(build_model(checkpoint, dtype), checkpoint)
        assert plan.layout_hash == expected.layout_hash
        assert plan.experts == {layer: tuple(slots) for layer, slots in expected.experts.items()}
        slab = shm.allocate(slab_bytes(plan))
        fill_slab(slab.writable(), plan, checkpoint, nothing)
        slab.seal()
        assert slab_digests(plan, slab.tensor()) == {name: found for name, found in expected.digests.items() if found}
        slab.close()
        with tempfile.TemporaryDirectory() as store:
            content = fingerprint(compute_digests(checkpoint, Path(store), 0, nothing))
        assert content == expected.checkpoint
        assert derive_key(content, plan.layout_hash) == expected.key(POST_PROCESSING)


@settings(max_examples=25, deadline=None)
@given(
    sparse=st.booleans(),
    tied=st.booleans(),
    stored=st.sampled_from(["bfloat16", "float16", "float32"]),
    dtype=st.sampled_from(["auto", "bfloat16", "float16", "float32"]),
    tp_size=st.sampled_from([1, 2, 4]),
    vocab_size=st.integers(1, 300),
    shards=st.integers(1, 3),
)
def test_oracle_and_reference_agree(
    sparse: bool, tied: bool, stored: str, dtype: str, tp_size: int, vocab_size: int, shards: int
) -> None:
    """Ranks whose rows are all padding, replicated KV heads, casts and tied embeddings among them."""
    config: dict[str, Any] = (tiny.SPARSE if sparse else tiny.DENSE) | {
        "dtype": stored,
        "tie_word_embeddings": tied,
        "vocab_size": vocab_size,
    }
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tiny.write(directory, config, tiny.make_tensors(config, getattr(torch, stored)), shards)
        compare(directory, tp_size, dtype)


@pytest.mark.parametrize("left_over", [{"num_experts": 6}, {"num_local_experts": 6}])
def test_a_dense_family_is_dense_whatever_its_configuration_has_left_over(
    tmp_path: Path, left_over: dict[str, int]
) -> None:
    tiny.write(tmp_path, tiny.DENSE)
    tiny.edit_json(tmp_path / "config.json", lambda config: config.update(left_over))
    compare(tmp_path, 2, "auto")
