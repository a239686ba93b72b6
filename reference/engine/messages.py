"""Every message between the engine's processes, as msgspec structs that travel as msgpack.

HTTP process to rank 0: `EngineRequest`. Rank 0 to HTTP process: `TokenOutput`. Rank 0 to the other ranks:
`RankMessage`. Tokens are ids of the model's vocabulary; positions count from 0 at the first prompt token;
log-probabilities are natural logarithms, of the model's own distribution (no temperature, no truncation).
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

from reference.errors import Refusal

GREEDY_TEMPERATURE = 1e-5
"""Temperatures below this are greedy: dividing logits by less would overflow float32."""

MAX_TOP_LOGPROBS = 2**24
"""Top log-probabilities that one request may ask for, over all its positions: they are held until it ends."""

Logprob: TypeAlias = tuple[float | None, int]
"""A log-probability and the token it belongs to; None for a token that nothing predicts."""


class RequestRefusal(Refusal):
    """A request that is not served as asked.

    `param` is the field at fault, `code` a stable word for programs, `status` the HTTP status.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How tokens are drawn, under SGLang's names. Making one checks it, and raises `RequestRefusal`.

    `temperature` 0 is greedy. `top_k` -1 keeps the whole vocabulary. Both truncations look at the same probabilities:
    a token is kept if it passes each. `sampling_seed` None lets the scheduler choose. `ignore_eos` looks past the
    model's end-of-sequence tokens; `stop_token_ids` stop in any case.
    """

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    sampling_seed: int | None = None
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self._require(self.max_new_tokens >= 1, "max_new_tokens", self.max_new_tokens, "1 or more")
        self._require(0 <= self.temperature <= 1e6, "temperature", self.temperature, "0 to 1000000")
        self._require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0, up to 1")
        self._require(self.top_k == -1 or 1 <= self.top_k < 2**31, "top_k", self.top_k, "-1 (all) or 1 to 2147483647")
        seed = self.sampling_seed
        in_range = seed is None or -(2**63) <= seed < 2**63
        self._require(in_range, "sampling_seed", seed, "a signed 64-bit integer")
        bad = [token for token in self.stop_token_ids if not 0 <= token < 2**31]
        self._require(not bad, "stop_token_ids", bad, "token ids, 0 to 2147483647")

    @staticmethod
    def _require(holds: bool, name: str, given: object, allowed: str) -> None:
        if not holds:
            raise RequestRefusal(f"{name}: {given} given, allowed: {allowed}", param=name)


class GenerateRequest(msgspec.Struct, frozen=True, tag="generate"):
    """One sequence to continue. `rid` names it in everything that follows.

    `return_logprob` asks for the log-probability of each output token, and of the prompt tokens from
    `logprob_start_len` on (-1: the last prompt token alone), the first of which has none; `top_logprobs_num` for that
    many of the likeliest tokens at each of these places, up to the vocabulary's size.
    """

    rid: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0


class AbortRequest(msgspec.Struct, frozen=True, tag="abort"):
    """Drop the request, wherever it is. Nothing more is sent for it. A request that has ended is no error."""

    rid: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """End all ranks now. What runs is dropped."""


EngineRequest: TypeAlias = GenerateRequest | AbortRequest | Shutdown


class TokenOutput(msgspec.Struct, frozen=True, tag="token_output", omit_defaults=True):
    """What one step added to a request.

    `finish_reason` is set on the last one: `stop` (`matched_stop` is the token, which is also the last of `token_ids`),
    `length`, or `abort` (`message` says why; there may be no tokens). The output lists are parallel to `token_ids`. The
    input lists come once, with the first tokens, and begin at `logprob_start_len`; they are parallel to each other, and
    the first entry has no log-probability and no top tokens. Top tokens are sorted: likeliest first, ties by lowest id.
    """

    rid: str
    token_ids: list[int]
    finish_reason: Literal["stop", "length", "abort"] | None = None
    matched_stop: int | None = None
    message: str | None = None
    output_token_logprobs: list[Logprob] = []
    output_top_logprobs: list[list[Logprob]] = []
    input_token_logprobs: list[Logprob] = []
    input_top_logprobs: list[list[Logprob]] = []


class SequenceStep(msgspec.Struct, frozen=True, array_like=True):
    """A sequence's part in a forward pass: `input_ids` stand at positions `start` onwards.

    `block_table` names the pool's blocks of positions 0 onwards, the new ones included. Logits are needed for each
    position from `logits_start` to the last one.
    """

    rid: str
    input_ids: list[int]
    start: int
    block_table: list[int]
    logits_start: int


class ForwardBatch(msgspec.Struct, frozen=True, tag="forward"):
    """One forward pass of every rank: whole sequences from position 0 (prefill), or one token each (decode)."""

    kind: Literal["prefill", "decode"]
    sequences: list[SequenceStep]


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """The last message of rank 0: leave the loop."""


RankMessage: TypeAlias = ForwardBatch | Stop


def check_request(
    request: GenerateRequest, context_length: int, max_total_tokens: int, prompt_param: str = "input_ids"
) -> None:
    """Raise `RequestRefusal` for a request that can never run, whatever else is running."""
    prompt, new = len(request.input_ids), request.sampling.max_new_tokens
    if prompt == 0:
        raise RequestRefusal(f"{prompt_param}: no tokens given, at least 1 is needed", param=prompt_param)
    for limit, what in ((context_length, "the context length is"), (max_total_tokens, "the KV pool holds")):
        if prompt + new > limit:
            given = f"{prompt} prompt tokens and {new} new ones given, {prompt + new} in all"
            message = f"{prompt_param}: {given}, {what} {limit}"
            raise RequestRefusal(message, param=prompt_param, code="context_length_exceeded")
    start, top = request.logprob_start_len, request.top_logprobs_num
    if not -1 <= start < prompt:
        message = f"logprob_start_len: {start} given, allowed: -1 to {prompt - 1} for this prompt"
        raise RequestRefusal(message, param="logprob_start_len")
    positions = new + (prompt - start if start >= 0 else 1)
    if not 0 <= top * positions <= MAX_TOP_LOGPROBS:
        allowed = f"0 to {MAX_TOP_LOGPROBS // positions} for {positions} positions"
        raise RequestRefusal(f"top_logprobs_num: {top} given, allowed: {allowed}", param="top_logprobs_num")
