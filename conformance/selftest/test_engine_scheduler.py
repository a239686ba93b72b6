"""The scheduler, driven by a runner whose pool really is read and written, so that a block with two owners shows."""

from __future__ import annotations

import hashlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.engine.kv import BlockPool
from reference.engine.messages import ForwardBatch, GenerateRequest, RequestRefusal, SamplingParams
from reference.engine.scheduler import LogitsResult, Scheduler

EOS = 3
VOCAB = 12


def next_token(history, seed):
    """The model and the sampler in one: a token that depends on every token before it, and on the seed."""
    digest = hashlib.blake2b(repr((list(history), seed)).encode(), digest_size=2).digest()
    return int.from_bytes(digest) % VOCAB


def expected_output(request):
    """Return the output ids and the finish reason that a request must have, computed alone."""
    sampling, ids = request.sampling, list(request.input_ids)
    for _ in range(sampling.max_new_tokens):
        ids.append(next_token(ids, sampling.sampling_seed))
        if (ids[-1] == EOS and not sampling.ignore_eos) or ids[-1] in sampling.stop_token_ids:
            return ids[len(request.input_ids) :], "stop"
    return ids[len(request.input_ids) :], "length"


class Runner:
    """Runs batches over a pool of tokens in place of keys and values."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.memory = [None] * (num_blocks * block_size)

    def slots(self, step):
        positions = range(step.start + len(step.input_ids))
        return [step.block_table[p // self.block_size] * self.block_size + p % self.block_size for p in positions]

    def run(self, scheduler, batch):
        # All are written before any is read: a block with two owners shows in this pass or the next.
        for step in batch.sequences:
            for slot, token in zip(self.slots(step)[step.start :], step.input_ids, strict=True):
                self.memory[slot] = token
        histories = [[self.memory[slot] for slot in self.slots(step)] for step in batch.sequences]
        queries, results = iter(scheduler.queries(batch)), []
        for step, history in zip(batch.sequences, histories, strict=True):
            for row in range(step.logits_start, len(history)):
                query = next(queries)
                assert query.position == row + 1
                known = history[row + 1] if row + 1 < len(history) else None
                assert query.target == known
                token = next_token(history, query.seed) if known is None else known
                results.append(LogitsResult(token, logprob=-float(row), top_logprobs=((-1.0, token),)))
        assert next(queries, None) is None
        return results


def check_batch(batch, pool, limits):
    """Check what holds of every batch: no block twice, enough of them, no more sequences and tokens than allowed."""
    blocks = [block for step in batch.sequences for block in step.block_table]
    used = pool.num_blocks - pool.num_free
    assert len(blocks) == len(set(blocks))
    assert len(blocks) <= used if batch.kind == "prefill" else len(blocks) == used
    for step in batch.sequences:
        assert len(step.block_table) == pool.blocks_for(step.start + len(step.input_ids))
        assert (len(step.input_ids) == 1) if batch.kind == "decode" else (step.start == 0)
    assert len(batch.sequences) <= limits["max_running_requests"]
    if batch.kind == "prefill" and len(batch.sequences) > 1:
        assert sum(len(step.input_ids) for step in batch.sequences) <= limits["max_prefill_tokens"]


@st.composite
def workloads(draw):
    num_blocks, block_size = draw(st.integers(2, 12)), draw(st.integers(1, 4))
    room = num_blocks * block_size
    requests = []
    for i in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, min(room - 1, 16)))
        sampling = SamplingParams(
            max_new_tokens=draw(st.integers(1, min(room - prompt, 16))),
            sampling_seed=draw(st.integers(-3, 3)),
            ignore_eos=draw(st.booleans()),
            stop_token_ids=draw(st.sampled_from([(), (5,)])),
        )
        request = GenerateRequest(
            rid=str(i),
            input_ids=tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=prompt, max_size=prompt))),
            sampling=sampling,
            return_logprob=draw(st.booleans()),
            logprob_start_len=draw(st.integers(-1, prompt - 1)),
        )
        requests.append((draw(st.integers(0, 12)), request, draw(st.none() | st.integers(0, 20))))
    limits = {"max_running_requests": draw(st.integers(1, 5)), "max_prefill_tokens": draw(st.integers(1, 24))}
    return num_blocks, block_size, requests, limits


@settings(max_examples=300, deadline=None)
@given(workloads())
def test_any_workload_gives_each_request_its_own_output_and_leaks_nothing(workload):
    num_blocks, block_size, requests, limits = workload
    pool, runner = BlockPool(num_blocks, block_size), Runner(num_blocks, block_size)
    scheduler = Scheduler(pool, context_length=64, eos_token_ids=[EOS], **limits)
    outputs = {request.rid: [] for _, request, _ in requests}
    aborted = set()
    # Each pass gives at least one token, and a retraction costs no more than one pass again.
    for step in range(2 * sum(request.sampling.max_new_tokens for _, request, _ in requests) + 40):
        for arrival, request, abort in requests:
            if arrival == step:
                scheduler.add(request)
            if abort is not None and abort == step - arrival:
                scheduler.abort(request.rid)
                aborted.add(request.rid)
        batch = scheduler.next_batch()
        if batch is None:
            assert pool.num_free == num_blocks
            continue
        check_batch(batch, pool, limits)
        for output in scheduler.commit(batch, runner.run(scheduler, batch)):
            assert output.rid not in aborted
            outputs[output.rid].append(output)
    assert not scheduler.has_work
    assert pool.num_free == num_blocks
    for _, request, _ in requests:
        got = outputs[request.rid]
        ids, reason = expected_output(request)
        tokens = [token for output in got for token in output.token_ids]
        if request.rid in aborted and (not got or got[-1].finish_reason is None):
            assert tokens == ids[: len(tokens)]
            continue
        assert (tokens, got[-1].finish_reason) == (ids, reason)
        assert [output.finish_reason for output in got[:-1]] == [None] * (len(got) - 1)
        assert got[-1].matched_stop == (tokens[-1] if reason == "stop" else None)
        check_logprobs(request, got, tokens)


def check_logprobs(request, got, tokens):
    """Rows answer with minus their position, so each log-probability says where it came from."""
    own = [item for output in got for item in output.output_token_logprobs]
    inputs = [item for output in got for item in output.input_token_logprobs]
    prompt, start = request.input_ids, request.logprob_start_len
    start = len(prompt) - 1 if start < 0 else start
    if not request.return_logprob:
        assert own == inputs == []
        return
    assert own == [(-float(len(prompt) - 1 + i), token) for i, token in enumerate(tokens)]
    assert inputs == [(None, prompt[start]), *((-float(p - 1), prompt[p]) for p in range(start + 1, len(prompt)))]
    assert got[0].input_token_logprobs == inputs
    assert [len(top) for top in got[0].input_top_logprobs] == [0] + [1] * (len(inputs) - 1)


def make(num_blocks=8, block_size=2, **limits):
    pool = BlockPool(num_blocks, block_size)
    defaults = {"max_running_requests": 4, "max_prefill_tokens": 8, "context_length": 64, "eos_token_ids": []}
    return Scheduler(pool, **(defaults | limits)), pool, Runner(num_blocks, block_size)


def request(rid, prompt=2, new=4, **fields):
    return GenerateRequest(rid, tuple(range(prompt)), SamplingParams(max_new_tokens=new), **fields)


def kinds(scheduler, runner, passes):
    """Run some passes; return what each was: its kind and its rids."""
    seen = []
    for _ in range(passes):
        batch = scheduler.next_batch()
        seen.append((batch.kind[0] + ":" + "".join(step.rid for step in batch.sequences)) if batch else None)
        if batch:
            scheduler.commit(batch, runner.run(scheduler, batch))
    return seen


def test_what_waits_is_prefilled_before_what_runs_goes_on():
    scheduler, _, runner = make()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert kinds(scheduler, runner, 2) == ["p:ab", "d:ab"]
    scheduler.add(request("c", new=2))
    assert kinds(scheduler, runner, 4) == ["p:c", "d:abc", "d:ab", None]


def test_a_prefill_holds_the_limit_except_for_one_long_prompt():
    scheduler, _, runner = make(num_blocks=40)
    for rid, prompt in (("a", 5), ("b", 3), ("c", 1), ("d", 20)):
        scheduler.add(request(rid, prompt, new=1))
    assert kinds(scheduler, runner, 4) == ["p:ab", "p:c", "p:d", None]


def test_max_running_requests_bounds_what_is_decoded_together():
    scheduler, _, runner = make(max_running_requests=2)
    for rid in "abc":
        scheduler.add(request(rid, new=2))
    assert kinds(scheduler, runner, 5) == ["p:ab", "d:ab", "p:c", "d:c", None]


def test_the_youngest_is_retracted_and_comes_back_with_its_tokens():
    # 4 blocks of 2: both prompts fit with a block each to grow, then the older one needs the younger one's.
    scheduler, pool, runner = make(num_blocks=4)
    scheduler.add(request("a", prompt=2, new=6))
    scheduler.add(request("b", prompt=2, new=4))
    assert kinds(scheduler, runner, 3) == ["p:ab", "d:ab", "d:ab"]
    batch = scheduler.next_batch()
    assert [step.rid for step in batch.sequences] == ["a"]
    assert pool.num_free == 1
    scheduler.commit(batch, runner.run(scheduler, batch))
    assert kinds(scheduler, runner, 2) == ["d:a", "d:a"]
    batch = scheduler.next_batch()
    (step,) = batch.sequences
    assert (batch.kind, step.rid, step.start, len(step.input_ids), step.logits_start) == ("prefill", "b", 0, 5, 4)


def test_who_was_retracted_comes_before_who_never_ran():
    scheduler, _, runner = make(num_blocks=4, max_running_requests=2)
    scheduler.add(request("a", prompt=2, new=5))
    scheduler.add(request("b", prompt=2, new=5))
    scheduler.add(request("c", prompt=1, new=1))
    assert kinds(scheduler, runner, 9) == ["p:ab", "d:ab", "d:ab", "d:a", "d:a", "p:b", "d:b", "p:c", None]


def test_nobody_comes_in_to_be_retracted_by_the_next_step():
    scheduler, _, runner = make(num_blocks=3)
    scheduler.add(request("a", prompt=2, new=3))
    assert kinds(scheduler, runner, 1) == ["p:a"]
    # One block would hold b's prompt, but a and b both need another for their next token, and two are free.
    scheduler.add(request("b", prompt=2, new=3))
    assert kinds(scheduler, runner, 4) == ["d:a", "d:a", "p:b", "d:b"]


def test_a_request_that_can_never_run_or_is_there_already_is_refused():
    scheduler, _, _ = make(num_blocks=3)
    with pytest.raises(RequestRefusal, match="3 prompt tokens and 4 new ones given, 7 in all, the KV pool holds 6"):
        scheduler.add(request("a", prompt=3))
    scheduler.add(request("a"))
    with pytest.raises(RequestRefusal, match="rid: a given, which is in use"):
        scheduler.add(request("a"))
    scheduler.next_batch()
    with pytest.raises(RequestRefusal, match="rid: a given, which is in use"):
        scheduler.add(request("a"))


def test_logits_that_are_no_numbers_abort_their_request_alone():
    scheduler, pool, runner = make()
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    batch = scheduler.next_batch()
    bad, good = scheduler.commit(batch, [LogitsResult(None), LogitsResult(7)])
    assert (bad.finish_reason, bad.token_ids) == ("abort", [])
    assert "position 1 have no finite maximum" in bad.message
    assert (good.finish_reason, good.token_ids) == (None, [7])
    assert kinds(scheduler, runner, 3)[0] == "d:b"
    assert pool.num_free == pool.num_blocks


def test_seeds_of_requests_without_one_come_from_the_random_seed_in_order_of_arrival():
    def seeds(random_seed):
        scheduler, _, _ = make(random_seed=random_seed)
        for rid in "abc":
            scheduler.add(request(rid))
        return [query.seed for query in scheduler.queries(scheduler.next_batch())]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 6


def test_the_same_calls_give_the_same_batches():
    def batches() -> list[ForwardBatch]:
        scheduler, _, runner = make(num_blocks=6)
        made = []
        for rid in "abcdef":
            scheduler.add(request(rid))
            batch = scheduler.next_batch()
            made.append(batch)
            scheduler.commit(batch, runner.run(scheduler, batch))
        return made

    assert batches() == batches()


def test_the_http_process_and_the_scheduler_need_no_torch():
    code = "import sys, reference.engine.scheduler, reference.engine.http; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
