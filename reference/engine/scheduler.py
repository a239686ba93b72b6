"""Continuous batching: which sequences run in the next forward pass, and in which KV blocks.

First come, first served: what runs is always older than what waits. A pass is the prefill of waiting requests where
some fit, else one decode step of everything that runs. When blocks run out the youngest is retracted: its blocks are
freed, its tokens are kept, and it is prefilled again later. Nothing here computes, and the same calls give the same
batches.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from reference.engine.messages import (
    ForwardBatch,
    GenerateRequest,
    Logprob,
    RequestRefusal,
    SamplingParams,
    SequenceStep,
    TokenOutput,
    check_request,
)

if TYPE_CHECKING:
    from reference.engine.kv import BlockPool

Finish: TypeAlias = tuple[Literal["stop", "length", "abort"] | None, int | None]


@dataclass(frozen=True)
class LogitsQuery:
    """What is asked of one row of logits, which predicts the token at `position`.

    `target` is that token where it is known (a prompt's); None asks for one to be drawn, by `sampling` and `seed`.
    """

    target: int | None
    position: int
    sampling: SamplingParams
    seed: int
    return_logprob: bool
    top_logprobs_num: int


@dataclass(frozen=True)
class LogitsResult:
    """The answer to a `LogitsQuery`: the target or the drawn token, and the log-probabilities that were asked for.

    `token_id` is None where the logits have no finite maximum, so that nothing can be drawn from them.
    """

    token_id: int | None
    logprob: float | None = None
    top_logprobs: tuple[Logprob, ...] = ()


@dataclass(eq=False)
class _Sequence:
    request: GenerateRequest
    seed: int
    output_ids: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids) + len(self.output_ids)

    @property
    def first_logprob(self) -> int:
        """The position where input log-probabilities start."""
        last = len(self.request.input_ids) - 1
        return last if self.request.logprob_start_len < 0 else self.request.logprob_start_len


class Scheduler:
    """Rank 0's view of all requests. Call `next_batch`, run it, answer its `queries`, then `commit`; `add` and `abort`
    between passes.

    max_running_requests: sequences decoded together. max_prefill_tokens: tokens of one prefill pass; a longer sequence
    gets a pass of its own. context_length: longest sequence, prompt and output. eos_token_ids: what ends a sequence.
    random_seed: from which requests without a seed get theirs, in order of arrival.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_running_requests: int,
        max_prefill_tokens: int,
        context_length: int,
        eos_token_ids: Collection[int],
        random_seed: int = 42,
    ) -> None:
        self._pool = pool
        self._max_running_requests = max_running_requests
        self._max_prefill_tokens = max_prefill_tokens
        self._context_length = context_length
        self._eos_token_ids = frozenset(eos_token_ids)
        self._seeds = random.Random(random_seed)
        self._waiting: deque[_Sequence] = deque()
        # By rid, in order of arrival.
        self._running: dict[str, _Sequence] = {}

    @property
    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, request: GenerateRequest) -> None:
        """Queue a request. Raises `RequestRefusal` for one that can never run, or whose rid is in use."""
        check_request(request, self._context_length, self._pool.num_tokens)
        if request.rid in self._running or any(waiting.request.rid == request.rid for waiting in self._waiting):
            raise RequestRefusal(f"rid: {request.rid} given, which is in use; a new one is needed", param="rid")
        seed = request.sampling.sampling_seed
        self._waiting.append(_Sequence(request, self._seeds.getrandbits(63) if seed is None else seed))

    def abort(self, rid: str) -> None:
        """Drop a request and free its blocks. A rid that is not known has ended already."""
        if rid in self._running:
            self._pool.free(self._running.pop(rid).block_table)
        self._waiting = deque(waiting for waiting in self._waiting if waiting.request.rid != rid)

    def next_batch(self) -> ForwardBatch | None:
        """Return the next forward pass, its blocks allocated; None where there is nothing to do."""
        admitted = self._admit()
        if admitted:
            return ForwardBatch("prefill", [self._step(sequence, 0) for sequence in admitted])
        self._grow_running()
        if self._running:
            return ForwardBatch("decode", [self._step(s, s.num_tokens - 1) for s in self._running.values()])
        return None

    def queries(self, batch: ForwardBatch) -> list[LogitsQuery]:
        """Return what is asked of the batch's rows of logits: sequence after sequence, from `logits_start` on."""
        queries = []
        for step in batch.sequences:
            sequence = self._running[step.rid]
            request = sequence.request
            for position in range(step.logits_start + 1, sequence.num_tokens + 1):
                queries.append(
                    LogitsQuery(
                        target=request.input_ids[position] if position < sequence.num_tokens else None,
                        position=position,
                        sampling=request.sampling,
                        seed=sequence.seed,
                        return_logprob=request.return_logprob,
                        top_logprobs_num=request.top_logprobs_num,
                    )
                )
        return queries

    def commit(self, batch: ForwardBatch, results: list[LogitsResult]) -> list[TokenOutput]:
        """Take the answers to `queries(batch)`, in its order; return what is new for each. Ended ones are freed."""
        outputs, row = [], 0
        for step in batch.sequences:
            end = row + _num_rows(step)
            outputs.append(self._advance(self._running[step.rid], results[row:end]))
            row = end
        return outputs

    def _admit(self) -> list[_Sequence]:
        """Move sequences from waiting to running, as many as one prefill pass takes."""
        admitted: list[_Sequence] = []
        tokens = 0
        while self._waiting and len(self._running) < self._max_running_requests:
            sequence = self._waiting[0]
            tokens += sequence.num_tokens
            if admitted and tokens > self._max_prefill_tokens:
                break
            needed = self._pool.blocks_for(sequence.num_tokens)
            # Room for everyone's next block, so that who comes in is not retracted by the step that follows.
            reserve = len(self._running) + 1 if self._running else 0
            if needed + reserve > self._pool.num_free:
                break
            self._waiting.popleft()
            sequence.block_table = self._pool.allocate(needed)
            self._running[sequence.request.rid] = sequence
            admitted.append(sequence)
        return admitted

    def _grow_running(self) -> None:
        """Give each running sequence the block of its newest token, oldest first, retracting the youngest for it."""
        for sequence in list(self._running.values()):
            missing = self._pool.blocks_for(sequence.num_tokens) - len(sequence.block_table)
            while self._pool.num_free < missing and sequence.request.rid in self._running:
                _, youngest = self._running.popitem()
                self._pool.free(youngest.block_table)
                youngest.block_table = []
                self._waiting.appendleft(youngest)
            if sequence.request.rid not in self._running:
                return
            sequence.block_table += self._pool.allocate(missing)

    def _step(self, sequence: _Sequence, start: int) -> SequenceStep:
        tokens = [*sequence.request.input_ids, *sequence.output_ids]
        # A sequence that was retracted has given its prompt's log-probabilities already.
        wants_input = start == 0 and sequence.request.return_logprob and not sequence.output_ids
        return SequenceStep(
            rid=sequence.request.rid,
            input_ids=tokens[start:],
            start=start,
            block_table=list(sequence.block_table),
            logits_start=sequence.first_logprob if wants_input else len(tokens) - 1,
        )

    def _advance(self, sequence: _Sequence, results: list[LogitsResult]) -> TokenOutput:
        request, drawn, is_first = sequence.request, results[-1], not sequence.output_ids
        if drawn.token_id is None:
            self.abort(request.rid)
            message = f"the model's logits at position {sequence.num_tokens - 1} have no finite maximum"
            return TokenOutput(request.rid, [], finish_reason="abort", message=message)
        sequence.output_ids.append(drawn.token_id)
        finish_reason, matched_stop = self._finish(sequence, drawn.token_id)
        if finish_reason is not None:
            self._pool.free(self._running.pop(request.rid).block_table)
        output = TokenOutput(request.rid, [drawn.token_id], finish_reason=finish_reason, matched_stop=matched_stop)
        if request.return_logprob:
            output.output_token_logprobs.append((drawn.logprob, drawn.token_id))
            output.output_top_logprobs.append(list(drawn.top_logprobs))
        if request.return_logprob and is_first:
            known = request.input_ids[sequence.first_logprob :]
            logprobs = [None, *(result.logprob for result in results[:-1])]
            output.input_token_logprobs.extend(zip(logprobs, known, strict=True))
            output.input_top_logprobs.extend([[], *(list(result.top_logprobs) for result in results[:-1])])
        return output

    def _finish(self, sequence: _Sequence, token: int) -> Finish:
        sampling = sequence.request.sampling
        ends = token in self._eos_token_ids and not sampling.ignore_eos
        if ends or token in sampling.stop_token_ids:
            return "stop", token
        if len(sequence.output_ids) >= sampling.max_new_tokens:
            return "length", None
        return None, None


def _num_rows(step: SequenceStep) -> int:
    return step.start + len(step.input_ids) - step.logits_start
