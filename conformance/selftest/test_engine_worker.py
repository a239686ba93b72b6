"""The loop of the ranks, with a model whose answers can be computed without it."""

from __future__ import annotations

import queue
import socket
import threading
from contextlib import contextmanager

import msgspec
import pytest
import torch

from conformance.selftest.tiny_engine import VOCAB_SIZE, AttentionModel
from reference.engine import worker
from reference.engine.channel import Channel
from reference.engine.kv import BlockPool
from reference.engine.messages import (
    AbortRequest,
    ForwardBatch,
    GenerateRequest,
    RankMessage,
    SamplingParams,
    Shutdown,
    TokenOutput,
)
from reference.engine.scheduler import Scheduler

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


class Ranks:
    """Ranks as threads: rank 0 with a scheduler, and followers; each with a pool of its own."""

    def __init__(self, num_blocks=64, block_size=4, followers=0, **limits):
        ours, theirs = socket.socketpair()
        self.channel = Channel[TokenOutput](ours, TokenOutput)
        self.models = [AttentionModel() for _ in range(followers + 1)]
        self.caches = [model.make_kv_cache(num_blocks, block_size) for model in self.models]
        self.batches: list[ForwardBatch] = []
        # One is taken a pass; a test that takes it away decides when passes run.
        self.passes: threading.Semaphore | None = None
        self._inboxes = [queue.Queue() for _ in range(followers)]
        defaults = {"max_running_requests": 8, "max_prefill_tokens": 64, "context_length": 256, "eos_token_ids": []}
        self.pool = BlockPool(num_blocks, block_size)
        scheduler = Scheduler(self.pool, **(defaults | limits))
        self._errors: list[BaseException] = []
        rank_0 = Channel(theirs, worker.EngineRequest)
        self.threads = [threading.Thread(target=self._run, args=(0, scheduler, rank_0, self._broadcast))]
        for rank in range(1, followers + 1):
            inbox = self._inboxes[rank - 1]
            self.threads.append(threading.Thread(target=self._run, args=(rank, None, None, lambda _, i=inbox: i.get())))

    def _broadcast(self, data):
        message = msgspec.msgpack.decode(data, type=RankMessage)
        if isinstance(message, ForwardBatch):
            self.batches.append(message)
            if self.passes is not None:
                self.passes.acquire()
        for inbox in self._inboxes:
            inbox.put(data)
        return data

    def _run(self, rank, scheduler, channel, broadcast):
        try:
            model, cache = self.models[rank], self.caches[rank]
            worker.run_worker(model, cache, scheduler, channel, broadcast, vocab_size=VOCAB_SIZE)
        except BaseException as error:
            self._errors.append(error)
        finally:
            if channel is not None:
                channel.close()

    @contextmanager
    def running(self, drained=True):
        """Start the threads; at the end wait for all of them to return by themselves, no block in use if `drained`."""
        for thread in self.threads:
            thread.start()
        try:
            yield
        finally:
            self.channel.send(Shutdown())
            for thread in self.threads:
                thread.join(60)
            self.channel.close()
        assert not any(thread.is_alive() for thread in self.threads)
        assert self._errors == []
        assert (self.pool.num_free == self.pool.num_blocks) == drained

    def generate(self, requests):
        """Send all requests at once; return each one's outputs."""
        outputs = {request.rid: [] for request in requests}
        for request in requests:
            self.channel.send(request)
        while not all(got and got[-1].finish_reason for got in outputs.values()):
            output = self.channel.receive()
            assert output is not None, self._errors
            outputs[output.rid].append(output)
        return outputs


def prompts(count):
    generator = torch.Generator().manual_seed(3)
    return [tuple(torch.randint(0, VOCAB_SIZE, (3 + 5 * i % 17,), generator=generator).tolist()) for i in range(count)]


def greedy_alone(prompt, count):
    """Continue a prompt by dense attention, without pool and scheduler."""
    model, ids = AttentionModel(), list(prompt)
    for _ in range(count):
        ids.append(model.logits(ids)[-1].argmax().item())
    return ids[len(prompt) :]


def token_ids(outputs):
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize(
    "shape",
    [
        {"max_running_requests": 1},
        {"max_running_requests": 8},
        {"num_blocks": 10, "block_size": 3},
        {"followers": 1, "num_blocks": 10, "block_size": 3},
    ],
    ids=["one by one", "batched", "retracting", "two ranks"],
)
def test_greedy_tokens_are_those_of_dense_attention_however_they_are_batched(shape):
    requests = [GenerateRequest(str(i), prompt, GREEDY) for i, prompt in enumerate(prompts(6))]
    ranks = Ranks(**shape)
    with ranks.running():
        outputs = ranks.generate(requests)
    for request in requests:
        assert token_ids(outputs[request.rid]) == greedy_alone(request.input_ids, 12)
        assert outputs[request.rid][-1].finish_reason == "length"
    if "num_blocks" in shape:
        prefilled = sum(len(batch.sequences) for batch in ranks.batches if batch.kind == "prefill")
        assert prefilled > len(requests), "this shape is meant to retract"
    for cache in ranks.caches[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ranks.caches[0].k, cache.k, strict=True))
        assert ranks.models[1].calls == ranks.models[0].calls


def test_seeded_tokens_do_not_depend_on_batching_or_retraction():
    def run(**shape):
        sampling = [SamplingParams(max_new_tokens=12, temperature=0.7, top_p=0.9, sampling_seed=i) for i in (1, 1, 2)]
        same = prompts(1)[0]
        requests = [GenerateRequest(str(i), same, params) for i, params in enumerate(sampling)]
        ranks = Ranks(**shape)
        with ranks.running():
            return [token_ids(outputs) for outputs in ranks.generate(requests).values()]

    together, alone, retracting = run(), run(max_running_requests=1), run(num_blocks=8, block_size=2)
    assert together == alone == retracting
    assert together[0] == together[1] != together[2]


@pytest.mark.parametrize("rows_at_a_time", [2, 256])
def test_logprobs_are_those_of_dense_attention(rows_at_a_time, monkeypatch):
    monkeypatch.setattr(worker, "_LOGITS_ROWS", rows_at_a_time)
    long, short = prompts(3)[2], prompts(1)[0]
    requests = [
        GenerateRequest("long", long, GREEDY, return_logprob=True, logprob_start_len=2, top_logprobs_num=VOCAB_SIZE),
        GenerateRequest("short", short, GREEDY),
    ]
    ranks = Ranks()
    with ranks.running():
        outputs = ranks.generate(requests)["long"]
    ids = [*long, *token_ids(outputs)]
    expected = AttentionModel().logits(ids).log_softmax(-1)
    first, inputs = outputs[0], outputs[0].input_token_logprobs
    assert [token for _, token in inputs] == list(long[2:])
    assert inputs[0][0] is None
    assert first.input_top_logprobs[0] == []
    for i, (value, token) in enumerate(inputs[1:]):
        assert value == pytest.approx(expected[2 + i, token].item(), abs=1e-4)
    for i, output in enumerate(outputs):
        ((value, token),) = output.output_token_logprobs
        assert value == pytest.approx(expected[len(long) - 1 + i, token].item(), abs=1e-4)
    tops = [*first.input_top_logprobs[1:], *(output.output_top_logprobs[0] for output in outputs)]
    for i, top in enumerate(tops):
        assert sorted(token for _, token in top) == list(range(VOCAB_SIZE))
        values = torch.tensor([value for value, _ in top])
        torch.testing.assert_close(values, expected[2 + i][[token for _, token in top]], rtol=0, atol=1e-4)


def test_a_request_that_can_never_run_is_answered_and_the_others_go_on():
    ranks = Ranks(num_blocks=8, block_size=4)
    with ranks.running():
        too_long = GenerateRequest("long", (1,) * 30, GREEDY)
        outputs = ranks.generate([too_long, GenerateRequest("short", (1, 2), GREEDY)])
    (refused,) = outputs["long"]
    assert (refused.finish_reason, refused.token_ids) == ("abort", [])
    assert refused.message == "input_ids: 30 prompt tokens and 12 new ones given, 42 in all, the KV pool holds 32"
    assert len(token_ids(outputs["short"])) == 12


def test_an_aborted_request_gives_way_to_the_next():
    ranks = Ranks(max_running_requests=1)
    ranks.passes = threading.Semaphore(1)
    with ranks.running():
        ranks.channel.send(GenerateRequest("endless", (1,), SamplingParams(max_new_tokens=250, temperature=0.0)))
        assert ranks.channel.receive().rid == "endless"
        ranks.channel.send(AbortRequest("endless"))
        ranks.channel.send(GenerateRequest("next", (2,), GREEDY))
        ranks.passes.release(13)
        outputs = [ranks.channel.receive()]
        while outputs[-1].finish_reason is None:
            outputs.append(ranks.channel.receive())
    # One more pass of the first request may have been on its way.
    rids = [output.rid for output in outputs]
    assert rids in (["next"] * 12, ["endless", *["next"] * 12])
    assert outputs[-1].finish_reason == "length"


def test_the_ranks_end_when_the_http_process_is_gone():
    ranks = Ranks(followers=1)
    ranks.passes = threading.Semaphore(1)
    with ranks.running(drained=False):
        ranks.channel.send(GenerateRequest("endless", (1,), SamplingParams(max_new_tokens=250, temperature=0.0)))
        assert ranks.channel.receive().rid == "endless"
        ranks.channel.close()
        ranks.passes.release()
