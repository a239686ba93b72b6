"""Prompts whose expected answers don't hang on a rounding error, and what `transformers` answers to them.

A router picks its top-k experts and greedy decoding its most likely token; where the choice is close, two correct
engines may differ by a whole expert or token. Prompts are therefore grown token by token, each the first of some seeded
candidates at which all routers are decided by a margin, and a prompt is kept only if its greedy continuation is decided
too. No check has to be made lenient for the sake of a close call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from conformance.checkpoints.weights import generator

#: Tokens of each prompt. One token alone, lengths around powers of two, and odd ones.
PROMPT_LENGTHS = (1, 4, 7, 16, 29)
#: Tokens of each greedy continuation.
CONTINUATION = 12
#: Least gap between the last chosen and the first rejected expert's router logits, at each prompt position.
ROUTER_MARGIN = 0.2
#: Least gap of the router's logits, and of the two most likely tokens', along the continuation.
CONTINUATION_MARGIN = 0.03
CANDIDATES = 48
ATTEMPTS = 200


@dataclass(frozen=True)
class Answer:
    """One prompt and what `transformers` makes of it.

    `input_ids` `[n]` and `output_ids` `[CONTINUATION]` are int64. `logprobs` `[n + CONTINUATION - 1, vocab]`, float32,
    are the log-probabilities of the next token at each position of the prompt and its continuation but the last.
    """

    input_ids: torch.Tensor
    output_ids: torch.Tensor
    logprobs: torch.Tensor
    router_margin: float
    token_margin: float


class Undecided(Exception):
    """No prompt was found at which the model decides clearly."""


@torch.no_grad()
def answers(model: PreTrainedModel, seed: int) -> list[Answer]:
    """Return one answer for each of `PROMPT_LENGTHS`. Raises `Undecided`."""
    return [_answer(model, length, seed) for length in PROMPT_LENGTHS]


def _answer(model: PreTrainedModel, length: int, seed: int) -> Answer:
    for attempt in range(ATTEMPTS):
        prompt = _grow(model, length, generator(seed, f"prompt/{length}/{attempt}"))
        if prompt is None:
            continue
        tokens = prompt
        for _ in range(CONTINUATION):
            logits, _ = _forward(model, tokens[None])
            tokens = torch.cat([tokens, logits[0, -1].argmax()[None]])
        logits, router = _forward(model, tokens[None, :-1])
        tail = logits[0, length - 1 :].topk(2).values
        token_margin = float((tail[:, 0] - tail[:, 1]).min())
        router_margin = float(router.min())
        if min(token_margin, router_margin) < CONTINUATION_MARGIN:
            continue
        return Answer(prompt, tokens[length:], logits[0].log_softmax(-1), router_margin, token_margin)
    raise Undecided(f"no prompt of {length} tokens is decided by its margins within {ATTEMPTS} attempts")


def _grow(model: PreTrainedModel, length: int, source: torch.Generator) -> torch.Tensor | None:
    """Return a prompt all of whose positions are decided by `ROUTER_MARGIN`, or None if some position has no such token."""
    vocabulary = model.config.vocab_size
    prompt = torch.empty(0, dtype=torch.int64)
    for _ in range(length):
        candidates = torch.randint(vocabulary, (CANDIDATES, 1), generator=source)
        _, margins = _forward(model, torch.cat([prompt.expand(CANDIDATES, -1), candidates], dim=1))
        decided = (margins[:, -1] >= ROUTER_MARGIN).nonzero()
        if not len(decided):
            return None
        prompt = torch.cat([prompt, candidates[decided[0, 0]]])
    return prompt


def _forward(model: PreTrainedModel, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits `[batch, position, vocab]` and the least router margin of all layers `[batch, position]`.

    A dense model's margins are infinite.
    """
    batch, positions = tokens.shape
    if not hasattr(model.config, "num_experts_per_tok"):
        return model(tokens).logits, torch.full((batch, positions), torch.inf)
    output = model(tokens, output_router_logits=True)
    chosen = model.config.num_experts_per_tok
    margins = []
    for router_logits in output.router_logits:
        ranked = router_logits.view(batch, positions, -1).sort(descending=True).values
        margins.append(ranked[..., chosen - 1] - ranked[..., chosen])
    return output.logits, torch.stack(margins).amin(0)
