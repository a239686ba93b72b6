"""Which slot a rank sends an expert's tokens to: SGLang's published choices, and what must hold for any placement."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference.context import Ranks, override_server_args
from reference.experts.location import (
    compute_logical_to_all_physical_map,
    compute_logical_to_rank_dispatch_physical_map,
)
from reference.parallel import initialize_groups


def published(ep_size: int, rank: int, **more: Any) -> override_server_args:
    return override_server_args(tp_size=ep_size, ep_size=ep_size, ranks=Ranks(rank, rank), **more)


def trivial(num_logical: int, num_physical: int) -> torch.Tensor:
    return torch.arange(num_physical).remainder(num_logical).unsqueeze(0)


@pytest.mark.parametrize(
    ("nnodes", "rows"),
    [
        (
            1,
            [
                [0, 1, 2, 11, 4, 5, 6, 7],
                [8, 9, 2, 3, 4, 5, 6, 7],
                [8, 1, 2, 11, 4, 5, 6, 7],
                [0, 9, 10, 11, 4, 5, 6, 7],
            ],
        ),
        (2, [[0, 1, 2, 3, 4, 5, 6, 7]] * 2 + [[8, 9, 10, 11, 4, 5, 6, 7]] * 2),
    ],
)
def test_compute_logical_to_rank_dispatch_physical_map(nnodes: int, rows: list[list[int]]) -> None:
    """8 experts, 4 ranks, 4 redundant slots: the rows that SGLang 0.5.23 gives."""
    for rank, row in enumerate(rows):
        with published(4, rank, nnodes=nnodes):
            initialize_groups()
            candidates, _ = compute_logical_to_all_physical_map(trivial(8, 12), 8, nearest_to=rank)
            table = compute_logical_to_rank_dispatch_physical_map(candidates, 12)
        assert table.tolist() == [row]


@st.composite
def placements(draw: st.DrawFn) -> tuple[int, int, list[list[int]]]:
    """EP size, number of logical experts, and a map in which each expert has a slot."""
    ep_size = draw(st.sampled_from([1, 2, 4]))
    logical = draw(st.integers(1, 6))
    physical = draw(st.sampled_from([n for n in range(logical, logical + 9) if n % ep_size == 0]))
    rows = []
    for _ in range(draw(st.integers(1, 2))):
        spare = draw(st.lists(st.integers(0, logical - 1), min_size=physical - logical, max_size=physical - logical))
        rows.append(draw(st.permutations([*range(logical), *spare])))
    return ep_size, logical, rows


@given(placements(), st.booleans())
def test_every_rank_sends_to_a_slot_that_holds_the_expert(
    placement: tuple[int, int, list[list[int]]], two: bool
) -> None:
    ep_size, logical, rows = placement
    placed, physical = torch.tensor(rows), len(rows[0])
    shares: list[torch.Tensor] = []
    for rank in range(ep_size):
        with published(ep_size, rank, nnodes=2 if two and ep_size > 1 else 1):
            initialize_groups()
            candidates, counts = compute_logical_to_all_physical_map(placed, logical)
            table = compute_logical_to_rank_dispatch_physical_map(candidates, physical)
        shares.append(table)
        assert torch.equal(placed.gather(1, table), torch.arange(logical).expand(len(rows), -1))
        assert counts.sum(1).tolist() == [physical] * len(rows)
        per_rank = physical // ep_size
        for layer, row in enumerate(rows):
            for expert in range(logical):
                mine = [slot for slot in range(rank * per_rank, (rank + 1) * per_rank) if row[slot] == expert]
                assert not mine or table[layer, expert] == mine[0], "a replica on the same GPU is not used"
                listed = [slot for slot in candidates[layer, expert].tolist() if slot != -1]
                assert listed == [slot for slot in range(physical) if row[slot] == expert]
    # All ranks drew from one stream: those without a near replica share the others evenly.
    if not two:
        for layer, row in enumerate(rows):
            for expert in range(logical):
                far = [
                    int(table[layer, expert])
                    for rank, table in enumerate(shares)
                    if expert not in row[rank * physical // ep_size : (rank + 1) * physical // ep_size]
                ]
                uses = Counter(far)
                spread = [uses[slot] for slot in range(physical) if row[slot] == expert]
                assert max(spread) - min(spread) <= 1


@given(placements())
def test_the_same_placement_gives_the_same_table(placement: tuple[int, int, list[list[int]]]) -> None:
    ep_size, logical, rows = placement
    with published(ep_size, 0):
        initialize_groups()
        candidates, _ = compute_logical_to_all_physical_map(torch.tensor(rows), logical)
        first = compute_logical_to_rank_dispatch_physical_map(candidates, len(rows[0]))
        assert torch.equal(first, compute_logical_to_rank_dispatch_physical_map(candidates, len(rows[0])))


def test_two_replicas_on_one_rank_are_both_listed() -> None:
    """What the published balancing makes in most layers of real models: neither slot may be forgotten."""
    with published(2, 0):
        initialize_groups()
        candidates, counts = compute_logical_to_all_physical_map(torch.tensor([[0, 0, 1, 2, 3, 3, 2, 1]]), 4)
    assert candidates[0, 0, :2].tolist() == [0, 1]
    assert counts.tolist() == [[2, 2, 2, 2]]
