"""What an engine computes for the prompts of a checkpoint, in a form that can be compared bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from conformance.checkpoints import Answer
from conformance.targets.http import BadReply, EngineClient, TokenLogprob


@dataclass(frozen=True)
class Tolerance:
    """How far log-probabilities may lie from those that `transformers` computes in float32, over the full vocabulary."""

    largest: float
    mean: float


#: By the checkpoint's dtype, which is what the engine computes in. The suite's checkpoints have logits of standard
#: deviation 4 to 5; unrelated outputs differ by about 5 on average, and one wrong expert or norm by more than 0.5.
#: - float32: only the order of sums differs. Two implementations on one machine differed by 2e-5 at most; 1e-3 leaves room
#:   for other kernels and sums split over ranks.
#: - 16 bit: each layer rounds its activations to 8 (bfloat16) or 11 bits. `transformers` itself, run in bfloat16, differed
#:   from its own float32 by 0.5 at most and 0.09 on average; the bounds are three and two times that.
TOLERANCES = {
    "float32": Tolerance(largest=1e-3, mean=1e-4),
    "float16": Tolerance(largest=0.2, mean=0.03),
    "bfloat16": Tolerance(largest=1.5, mean=0.2),
}


@dataclass(frozen=True)
class Output:
    """An engine's answer to one prompt: greedy tokens, and the next token's log-probabilities at each position.

    `logprobs` is float32 `[prompt tokens + output tokens - 1, vocabulary]`, as in `checkpoints.Answer`.
    """

    output_ids: tuple[int, ...]
    logprobs: npt.NDArray[np.float32]


def measure(client: EngineClient, answers: Sequence[Answer], vocab_size: int) -> list[Output]:
    """Ask an engine for each prompt's greedy continuation and all log-probabilities, one request after the other.

    Raises `BadReply`, also where the reply leaves tokens out or contradicts itself.
    """
    return [_measure_one(client, answer, vocab_size) for answer in answers]


def _measure_one(client: EngineClient, answer: Answer, vocab_size: int) -> Output:
    prompt = list(answer.input_ids)
    reply = client.generate(prompt, max_new_tokens=len(answer.output_ids), top_logprobs_num=vocab_size)
    meta = reply.meta_info
    positions = [*(meta.input_top_logprobs or [])[1:], *(meta.output_top_logprobs or [])]
    chosen = [*(meta.input_token_logprobs or [])[1:], *(meta.output_token_logprobs or [])]
    expected = len(prompt) - 1 + len(reply.output_ids)
    if len(positions) != expected or len(chosen) != expected:
        got = f"{len(positions)} positions with {len(chosen)} chosen tokens"
        raise BadReply(f"POST /generate: log-probabilities of {expected} positions expected, got {got}")
    logprobs = np.full((expected, vocab_size), np.nan, dtype=np.float32)
    for row, items, (value, token, _) in zip(logprobs, positions, chosen, strict=True):
        _fill(row, items or [])
        if value is None or np.float32(value) != row[token]:
            raise BadReply(f"POST /generate: token {token} has {value} alone, {row[token]} among all")
    tokens = [*prompt[1:], *reply.output_ids]
    if [token for _, token, _ in chosen] != tokens:
        raise BadReply("POST /generate: log-probabilities belong to other tokens than those of prompt and output")
    return Output(tuple(reply.output_ids), logprobs)


def _fill(row: npt.NDArray[np.float32], items: list[TokenLogprob]) -> None:
    ids = [token for _, token, _ in items]
    if sorted(ids) != list(range(len(row))):
        raise BadReply(f"POST /generate: top_logprobs_num {len(row)} gave {len(set(ids))} different tokens")
    row[ids] = [np.nan if value is None else value for value, _, _ in items]


def difference(expected: Sequence[Output], got: Sequence[Output]) -> str | None:
    """Return where two engines' outputs first differ, or None where they are equal to the bit."""
    for prompt, (one, two) in enumerate(zip(expected, got, strict=True)):
        if one.output_ids != two.output_ids:
            return f"prompt {prompt}: tokens {list(one.output_ids)} and {list(two.output_ids)}"
        unequal = one.logprobs.view(np.uint32) != two.logprobs.view(np.uint32)
        if unequal.any():
            position, token = (int(index) for index in np.argwhere(unequal)[0])
            values = f"{one.logprobs[position, token]!r} and {two.logprobs[position, token]!r}"
            return f"prompt {prompt}, position {position}, token {token}: {values}; {int(unequal.sum())} values differ"
    return None


def distance(expected: Sequence[Answer], got: Sequence[Output], *, whole: bool) -> Tolerance:
    """Return the largest and the mean distance of log-probabilities; not a number counts as infinitely far.

    `whole` compares the continuation too; else prompt positions alone, which don't depend on the tokens an engine chose.
    """
    largest = mean = 0.0
    for answer, output in zip(expected, got, strict=True):
        count = len(answer.logprobs) if whole else len(answer.input_ids)
        gap = np.abs(answer.logprobs[:count] - output.logprobs[:count])
        gap[np.isnan(gap)] = np.inf
        largest, mean = max(largest, float(gap.max())), max(mean, float(gap.mean()))
    return Tolerance(largest, mean)


def pack(outputs: Sequence[Output]) -> bytes:
    """Return outputs as bytes that `unpack` reads."""
    tensors: dict[str, npt.NDArray[np.generic]] = {}
    for index, output in enumerate(outputs):
        tensors[f"{index}.output_ids"] = np.asarray(output.output_ids, dtype=np.int64)
        tensors[f"{index}.logprobs"] = output.logprobs
    return save(tensors)


def unpack(data: bytes) -> list[Output]:
    """Return the outputs that `pack` wrote."""
    tensors = load(data)
    indices = range(len(tensors) // 2)
    return [Output(tuple(tensors[f"{i}.output_ids"].tolist()), tensors[f"{i}.logprobs"]) for i in indices]
