"""The sampler: what is drawn, what it depends on, and the log-probabilities beside it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.engine.messages import SamplingParams
from reference.engine.sampler import sample, uniform
from reference.engine.scheduler import LogitsQuery

VOCAB = 11
PADDED = 16


def query(seed=1, position=5, target=None, return_logprob=False, top=0, **sampling):
    return LogitsQuery(target, position, SamplingParams(**sampling), seed, return_logprob, top)


def padded(rows):
    """Append padding columns that would win if they counted."""
    logits = torch.as_tensor(rows, dtype=torch.float32)
    return torch.cat([logits, torch.full((len(logits), PADDED - logits.shape[1]), 50.0)], dim=1)


def tokens(logits, queries):
    return [result.token_id for result in sample(logits, queries, VOCAB)]


logit_rows = st.lists(
    st.lists(st.integers(-40, 40).map(lambda x: x / 4), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=6
)
any_sampling = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 5.0]),
        "top_p": st.sampled_from([0.05, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([-1, 1, 2, 5, VOCAB, 100]),
    }
)


@given(logit_rows)
def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals(rows):
    got = tokens(padded(rows), [query(temperature=0.0)] * len(rows))
    assert got == [row.index(max(row)) for row in rows]
    assert tokens(padded(rows), [query(top_k=1)] * len(rows)) == got


@settings(deadline=None)
@given(rows=logit_rows, data=st.data())
def test_a_draw_does_not_depend_on_its_batch(rows, data):
    queries = [
        query(seed=data.draw(st.integers(0, 9)), position=data.draw(st.integers(1, 9)), **data.draw(any_sampling))
        for _ in rows
    ]
    together = tokens(padded(rows), queries)
    alone = [tokens(padded([row]), [one])[0] for row, one in zip(rows, queries, strict=True)]
    assert together == alone
    assert tokens(padded(rows[::-1]), queries[::-1]) == alone[::-1]


@settings(deadline=None)
@given(row=logit_rows.map(lambda rows: rows[0]), sampling=any_sampling, seed=st.integers(-(2**63), 2**63 - 1))
def test_a_draw_is_the_one_that_its_definition_gives(row, sampling, seed):
    """Walk the tokens from the likeliest on, in exact steps, to the share that the uniform draw names."""
    one = query(seed=seed, position=3, **sampling)
    (got,) = tokens(padded([row]), [one])
    if sampling["temperature"] == 0:
        assert got == row.index(max(row))
        return
    weights = [math.exp((value - max(row)) / sampling["temperature"]) for value in row]
    probs = [weight / sum(weights) for weight in weights]
    kept, before = [], 0.0
    for token in sorted(range(VOCAB), key=lambda t: (-row[t], t)):
        if before < sampling["top_p"] and (sampling["top_k"] == -1 or len(kept) < sampling["top_k"]):
            kept.append(token)
        before += probs[token]
    assert got in kept
    share, walked = uniform(seed, 3) * sum(probs[token] for token in kept), 0.0
    for token in kept:
        walked += probs[token]
        if share < walked:
            # float32 probabilities may move a border by a rounding error.
            assert got == token or abs(share - walked) < 1e-5 or abs(share - walked + probs[token]) < 1e-5
            break


def test_draws_follow_the_distribution():
    row = torch.log(torch.tensor([[0.5, 0.25, 0.125, 0.125]]))
    logits = padded(torch.cat([row, torch.full((1, VOCAB - 4), -math.inf)], dim=1)).expand(8000, -1)
    for positions_differ in (True, False):
        queries = [query(*((7, i) if positions_differ else (i, 7))) for i in range(8000)]
        counts = torch.bincount(torch.tensor(tokens(logits, queries)), minlength=VOCAB) / 8000
        # Five standard deviations of the most uncertain share.
        assert counts[:4].tolist() == pytest.approx([0.5, 0.25, 0.125, 0.125], abs=5 * math.sqrt(0.25 / 8000))
        assert counts[4:].sum() == 0


def test_top_p_keeps_the_token_that_crosses_it_and_none_after():
    row = torch.log(torch.tensor([[0.5, 0.3, 0.1, 0.05, 0.05]]))
    logits = padded(torch.cat([row, torch.full((1, VOCAB - 5), -math.inf)], dim=1)).expand(500, -1)
    for top_p, kept in ((0.4, {0}), (0.6, {0, 1}), (0.85, {0, 1, 2}), (1.0, {0, 1, 2, 3, 4})):
        assert set(tokens(logits, [query(seed=i, top_p=top_p) for i in range(500)])) == kept
    assert set(tokens(logits, [query(seed=i, top_k=2) for i in range(500)])) == {0, 1}


def test_the_uniform_draw_is_what_it_was():
    """SplitMix64 from a second hand, and two values that pin the seed's and the position's part in it."""

    def splitmix64(state):
        z = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return z ^ z >> 31

    # The first outputs of the published generator for state 0.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
    for seed, position in ((0, 0), (1, 7), (-1, 3), (2**63 - 1, 100_000)):
        state = (splitmix64(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64
        assert uniform(seed, position) == (splitmix64(state) >> 12) / 2**52
    draws = {uniform(seed, position) for seed in range(50) for position in range(50)}
    assert len(draws) == 2500
    assert 0 <= min(draws) < 0.01
    assert 0.99 < max(draws) < 1


@given(logit_rows)
def test_logprobs_are_of_the_untouched_logits_and_top_tokens_are_sorted(rows):
    queries = [
        query(temperature=0.5, top_k=1, return_logprob=True, top=VOCAB),
        query(target=3, return_logprob=True, top=2),
        query(temperature=0.0),
    ]
    rows = [rows[i % len(rows)] for i in range(3)]
    drawn, known, silent = sample(padded(rows), queries, VOCAB)
    logprobs = [
        [value - math.log(sum(math.exp(x - max(row)) for x in row)) - max(row) for value in row] for row in rows
    ]
    assert drawn.logprob == pytest.approx(logprobs[0][drawn.token_id], abs=1e-5)
    order = sorted(range(VOCAB), key=lambda t: (-rows[0][t], t))
    assert [token for _, token in drawn.top_logprobs] == order
    assert [value for value, _ in drawn.top_logprobs] == pytest.approx([logprobs[0][t] for t in order], abs=1e-5)
    assert (known.token_id, len(known.top_logprobs)) == (3, 2)
    assert known.logprob == pytest.approx(logprobs[1][3], abs=1e-5)
    assert (silent.logprob, silent.top_logprobs) == (None, ())


@pytest.mark.parametrize("bad", [[math.nan] + [0.0] * 10, [math.inf] + [0.0] * 10, [-math.inf] * 11])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_without_a_finite_maximum_give_no_token(bad, temperature):
    good = [0.0] * 10 + [9.0]
    got = tokens(padded([good, bad, good]), [query(temperature=temperature, top_k=2)] * 3)
    assert got[1] is None
    assert got[0] is not None
    assert got[0] == got[2]
