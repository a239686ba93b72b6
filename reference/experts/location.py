"""Where experts are: the slots of each logical expert, and the slot that each rank sends its tokens to.

Maps are tensors of int64. *Physical* ids are slots over all ranks, `slots a rank` consecutive ones on each; *logical* ids
are the checkpoint's experts. Sizes and ranks are read from the published configuration. Source: SGLang `expert_location`.
"""

from __future__ import annotations

import random

import torch

from reference.context import get_parallel

# SGLang's constant: independent of the server's seed, so that every process draws the same.
_SEED = 42


def compute_logical_to_all_physical_map(
    physical_to_logical_map: torch.Tensor, num_logical_experts: int, nearest_to: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return every slot of each logical expert, ascending, and how many there are.

    `physical_to_logical_map` is `[layers, physical]`; the results are `[layers, logical, physical]`, padded with -1, and
    `[layers, logical]`. With `nearest_to`, an EP rank, an expert that has a replica on that rank, or on its node where
    that narrows the choice, is left with the first such slot alone: a choice for dispatch, never for what slots hold.
    """
    layers, physical = physical_to_logical_map.shape
    slots = torch.full((layers, num_logical_experts, physical), -1, dtype=torch.int64)
    counts = torch.zeros((layers, num_logical_experts), dtype=torch.int64)
    for layer, row in enumerate(physical_to_logical_map.tolist()):
        found: list[list[int]] = [[] for _ in range(num_logical_experts)]
        for slot, expert in enumerate(row):
            found[expert].append(slot)
        for expert, candidates in enumerate(found):
            nearest = None if nearest_to is None else _find_nearest(candidates, nearest_to, physical)
            kept = candidates if nearest is None else [nearest]
            slots[layer, expert, : len(kept)] = torch.tensor(kept)
            counts[layer, expert] = len(kept)
    return slots, counts


def compute_logical_to_rank_dispatch_physical_map(
    logical_to_all_physical_map: torch.Tensor, num_physical_experts: int, seed: int = _SEED
) -> torch.Tensor:
    """Return the slot that this EP rank sends each logical expert's tokens to: `[layers, logical]`.

    `logical_to_all_physical_map` is `[layers, logical, ...]`, padded with -1. Prefers the same GPU, then the same node
    where that narrows the choice; ranks that are left share the replicas evenly, by a seeded draw that is the same in
    every process with the same map.
    """
    draw = random.Random(seed)
    ep_size, ep_rank = get_parallel().ep_size, get_parallel().moe_ep_rank
    layers, logical = logical_to_all_physical_map.shape[:2]
    table = torch.empty((layers, logical), dtype=torch.int64)
    for layer in range(layers):
        for expert in range(logical):
            candidates = [slot for slot in logical_to_all_physical_map[layer, expert].tolist() if slot != -1]
            chosen = [_find_nearest(candidates, rank, num_physical_experts) for rank in range(ep_size)]
            # Drawn for all ranks at once, and whether or not this rank needs one: the stream is common to all.
            drawn = iter(_fair_choices(candidates, chosen.count(None), draw))
            table[layer, expert] = [next(drawn) if slot is None else slot for slot in chosen][ep_rank]
    return table


def _find_nearest(candidates: list[int], rank: int, num_physical_experts: int) -> int | None:
    """Return the first slot on the rank, or on its node where others are elsewhere; None where all are as far."""
    if len(candidates) == 1:
        return candidates[0]
    parallel = get_parallel()
    per_rank = num_physical_experts // parallel.ep_size
    per_node = per_rank * max(1, parallel.ep_size // parallel.nnodes)
    same_gpu = [slot for slot in candidates if slot // per_rank == rank]
    if same_gpu:
        return same_gpu[0]
    same_node = [slot for slot in candidates if slot // per_node == rank * per_rank // per_node]
    return same_node[0] if 0 < len(same_node) < len(candidates) else None


def _fair_choices(candidates: list[int], count: int, draw: random.Random) -> list[int]:
    """Return `count` choices in random order, in which no candidate comes twice more than another."""
    each, rest = divmod(count, len(candidates))
    choices = candidates * each + draw.sample(candidates, k=rest)
    draw.shuffle(choices)
    return choices
