"""The loop of a rank: rank 0 schedules, broadcasts each batch, samples and answers; every rank runs the forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Protocol, TypeAlias

import msgspec
import torch

from reference.engine.channel import Channel
from reference.engine.kv import KVCache
from reference.engine.messages import (
    AbortRequest,
    EngineRequest,
    ForwardBatch,
    GenerateRequest,
    RankMessage,
    RequestRefusal,
    Shutdown,
    Stop,
    TokenOutput,
)
from reference.engine.sampler import sample
from reference.engine.scheduler import LogitsResult, Scheduler
from reference.kernels.attention import AttentionBatch

Broadcast: TypeAlias = Callable[[bytes | None], bytes]

# Rows of logits computed at once: log-probabilities of a long prompt would need `[prompt, vocabulary]` otherwise.
_LOGITS_ROWS = 256


class CausalLM(Protocol):
    """What the loop asks of a model. Both are collective: every rank calls them with the same values."""

    def __call__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBatch, kv_cache: KVCache
    ) -> torch.Tensor:
        """Return the last hidden states `[T, hidden]` of tokens `[T]` (int64), their keys and values written."""

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits `[n, padded_vocab]` of hidden states `[n, hidden]`."""


@torch.inference_mode()
def run_worker(
    model: CausalLM,
    kv_cache: KVCache,
    scheduler: Scheduler | None,
    channel: Channel[EngineRequest] | None,
    broadcast: Broadcast,
    *,
    vocab_size: int,
) -> None:
    """Serve until told to stop, or until the HTTP process is gone. Rank 0 alone has a scheduler and a channel.

    `broadcast` is collective: rank 0 gives bytes, every rank gets them. Returns on all ranks after rank 0's `Stop`. An
    error of a forward pass is not caught: a rank that is broken must end, and its peers notice by their connection.
    """
    if scheduler is None or channel is None:
        _follow(model, kv_cache, broadcast)
    else:
        _lead(model, kv_cache, scheduler, channel, broadcast, vocab_size)


def _follow(model: CausalLM, kv_cache: KVCache, broadcast: Broadcast) -> None:
    decoder = msgspec.msgpack.Decoder(RankMessage)
    while isinstance(batch := decoder.decode(broadcast(None)), ForwardBatch):
        for _ in forward(model, kv_cache, batch):
            pass


def _lead(
    model: CausalLM,
    kv_cache: KVCache,
    scheduler: Scheduler,
    channel: Channel[EngineRequest],
    broadcast: Broadcast,
    vocab_size: int,
) -> None:
    while _accept(scheduler, channel):
        batch = scheduler.next_batch()
        if batch is None:
            continue
        broadcast(msgspec.msgpack.encode(batch))
        queries = scheduler.queries(batch)
        results: list[LogitsResult] = []
        for logits in forward(model, kv_cache, batch):
            asked = queries[len(results) : len(results) + logits.shape[0]]
            results += sample(logits, asked, vocab_size)
        for output in scheduler.commit(batch, results):
            channel.send(output)
    broadcast(msgspec.msgpack.encode(Stop()))


def _accept(scheduler: Scheduler, channel: Channel[EngineRequest]) -> bool:
    """Take in what the HTTP process sent, waiting only where there is nothing else to do. False: stop."""
    first = None if scheduler.has_work else channel.receive()
    for message in chain([first] if first else [], channel.receive_ready()):
        match message:
            case GenerateRequest():
                try:
                    scheduler.add(message)
                except RequestRefusal as refusal:
                    channel.send(TokenOutput(message.rid, [], finish_reason="abort", message=str(refusal)))
            case AbortRequest():
                scheduler.abort(message.rid)
            case Shutdown():
                return False
    return not channel.closed


def forward(model: CausalLM, kv_cache: KVCache, batch: ForwardBatch) -> Iterator[torch.Tensor]:
    """Run one pass; yield the logits that it asks for, `[rows, padded_vocab]` float32, a bounded number at a time.

    Every rank must exhaust it, since `compute_logits` is collective. Rows come sequence after sequence.
    """
    steps, device = batch.sequences, kv_cache.device
    attention = AttentionBatch.make(
        [len(step.input_ids) for step in steps],
        [step.start for step in steps],
        [step.block_table for step in steps],
        kv_cache.block_size,
        device,
    )
    input_ids = torch.tensor(list(chain.from_iterable(step.input_ids for step in steps)), device=device)
    hidden = model(input_ids, attention.positions, attention, kv_cache)
    rows: list[int] = []
    first = 0
    for step in steps:
        end = first + len(step.input_ids)
        rows += range(first + step.logits_start - step.start, end)
        first = end
    for start in range(0, len(rows), _LOGITS_ROWS):
        yield model.compute_logits(hidden[torch.tensor(rows[start : start + _LOGITS_ROWS], device=device)])
