"""From logits to tokens and log-probabilities.

A draw depends on the row's logits, the request's parameters, its seed and the token's position, and on nothing else:
what else is in the batch, or that a sequence was retracted and computed again, changes no draw.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from reference.engine.messages import GREEDY_TEMPERATURE, Logprob
from reference.engine.scheduler import LogitsQuery, LogitsResult

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def sample(logits: torch.Tensor, queries: Sequence[LogitsQuery], vocab_size: int) -> list[LogitsResult]:
    """Answer each query from its row of `logits`, `[queries, padded_vocab]`, float32.

    Columns from `vocab_size` on are padding and never count. Greedy takes the largest logit, the lowest id among
    equals. Log-probabilities are log_softmax in float32 of the logits as they are, before temperature and truncation;
    top tokens come likeliest first, the lowest id among equals.
    """
    logits = logits[:, :vocab_size].float()
    finite = logits.amax(-1).isfinite().tolist()
    chosen: list[int] = logits.argmax(-1).tolist()
    for row, query in enumerate(queries):
        if query.target is not None:
            chosen[row] = query.target
    drawn = [row for row, query in enumerate(queries) if query.target is None and finite[row] and not _is_greedy(query)]
    if drawn:
        for row, token in zip(drawn, _draw(logits[drawn], [queries[row] for row in drawn]), strict=True):
            chosen[row] = token
    scores = _score(logits, queries, chosen)
    return [LogitsResult(chosen[row] if finite[row] else None, *scores[row]) for row in range(len(queries))]


def uniform(seed: int, position: int) -> float:
    """Return the draw from `[0, 1)` that belongs to a position of a seeded request: 52 bits, the same on every machine.

    SplitMix64 scrambles the seed to the start of a stream, whose element number `position` is the draw.
    """
    return (_splitmix64(_splitmix64(seed) + position * _GOLDEN) >> 12) / 2**52


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def _is_greedy(query: LogitsQuery) -> bool:
    return query.sampling.temperature < GREEDY_TEMPERATURE or query.sampling.top_k == 1


def _draw(logits: torch.Tensor, queries: list[LogitsQuery]) -> list[int]:
    """Draw a token a row: sort, keep what both truncations keep, and walk the kept weights up to the uniform draw."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device).unsqueeze(1)

    temperature = column([query.sampling.temperature for query in queries]).float()
    top_p = column([query.sampling.top_p for query in queries])
    top_k = column([query.sampling.top_k if query.sampling.top_k > 0 else float("inf") for query in queries])
    draw = column([uniform(query.seed, query.position) for query in queries])

    probs, tokens = (logits / temperature).softmax(-1).double().sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=logits.device)
    keep = (probs.cumsum(-1) - probs < top_p) & (rank < top_k)
    weights = torch.where(keep, probs, 0.0).cumsum(-1)
    picked = torch.searchsorted(weights, draw * weights[:, -1:], right=True)
    drawn: list[int] = tokens.gather(-1, picked).squeeze(-1).tolist()
    return drawn


def _score(
    logits: torch.Tensor, queries: Sequence[LogitsQuery], chosen: list[int]
) -> list[tuple[float | None, tuple[Logprob, ...]]]:
    """Return each row's log-probability of the chosen token and its top tokens, where they are asked for."""
    scores: list[tuple[float | None, tuple[Logprob, ...]]] = [(None, ())] * len(queries)
    rows = [row for row, query in enumerate(queries) if query.return_logprob]
    if not rows:
        return scores
    logprobs = logits[rows].log_softmax(-1)
    own = logprobs.gather(-1, torch.tensor([[chosen[row]] for row in rows], device=logits.device)).squeeze(-1).tolist()
    widest = max(queries[row].top_logprobs_num for row in rows)
    values: list[list[float]] = [[]] * len(rows)
    tokens: list[list[int]] = [[]] * len(rows)
    if widest:
        top = logprobs.sort(dim=-1, descending=True, stable=True)
        values, tokens = top.values[:, :widest].tolist(), top.indices[:, :widest].tolist()
    for i, row in enumerate(rows):
        count = queries[row].top_logprobs_num
        scores[row] = (own[i], tuple(zip(values[i][:count], tokens[i][:count], strict=True)))
    return scores
