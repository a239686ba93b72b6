"""OpenAI's endpoints, as the `openai` client meets them."""

from __future__ import annotations

import openai
import pytest

from conformance.selftest.tiny_engine import make_tokenizer
from conformance.selftest.tiny_server import CONTEXT_LENGTH, POOL_TOKENS, counted, counting_engine
from reference.engine.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def tokenizer(directory):
    return Tokenizer.load(directory)


@pytest.fixture(scope="module")
def port(directory):
    with counting_engine(directory) as port:
        yield port


@pytest.fixture(scope="module")
def client(port):
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_openai_completions(client, tokenizer):
    reply = client.completions.create(model="tiny", prompt="the cat", temperature=0, max_tokens=4, logprobs=2)
    ids = tokenizer.encode("the cat")
    (choice,) = reply.choices
    expected = counted(ids, 4)
    assert (choice.text, choice.finish_reason, reply.object) == (
        tokenizer.decode(expected),
        "length",
        "text_completion",
    )
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(ids), 4)
    assert choice.logprobs.tokens == [tokenizer.decode([token]) for token in expected]
    assert choice.logprobs.token_logprobs == pytest.approx([-0.4586751] * 4, abs=1e-4)
    assert [len(top) for top in choice.logprobs.top_logprobs] == [2] * 4
    assert choice.logprobs.text_offset[0] == 0
    assert choice.logprobs.text_offset[-1] == sum(map(len, choice.logprobs.tokens[:-1]))


def test_openai_completions_of_several_prompts_and_choices(client, tokenizer):
    prompts = [[10], [100, 101]]
    fields = {"model": "tiny", "prompt": prompts, "max_tokens": 6, "n": 2, "seed": 5, "temperature": 2.0}
    first, second = (client.completions.create(**fields) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices], "a seed gives the same again"
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert texts[0] != texts[1]
    assert first.usage.prompt_tokens == 3
    assert first.usage.completion_tokens == 24
    streamed = {}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == texts


def test_openai_completions_stream_with_logprobs_and_usage(client, tokenizer):
    fields = {"model": "tiny", "prompt": [200, 201], "max_tokens": 8, "temperature": 0, "logprobs": 1}
    whole = client.completions.create(**fields)
    *chunks, last = client.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert {chunk.usage for chunk in chunks} == {None}
    assert (last.choices, last.usage) == ([], whole.usage)
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [item for chunk in chunks for item in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * 7 + ["length"]


def test_openai_chat(client, tokenizer):
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, max_completion_tokens=5, logprobs=True, top_logprobs=3
    )
    prompt = tokenizer.apply_chat_template(MESSAGES)
    expected = counted(prompt, 5)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", tokenizer.decode(expected))
    assert (choice.finish_reason, reply.usage.prompt_tokens, reply.usage.total_tokens) == (
        "length",
        len(prompt),
        len(prompt) + 5,
    )
    assert len(choice.logprobs.content) == 5
    for entry, token in zip(choice.logprobs.content, expected, strict=True):
        assert entry.token == tokenizer.decode([token], skip_special_tokens=False)
        assert entry.bytes == (None if "\ufffd" in entry.token else list(entry.token.encode()))
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 3


def test_openai_chat_stream(client):
    parts = [{"type": "text", "text": "the "}, {"type": "text", "text": "cat"}]
    fields = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 3, "n": 2, "top_p": 0.9}
    whole = client.chat.completions.create(**fields)
    again = client.chat.completions.create(**(fields | {"messages": [{"role": "user", "content": parts}]}))
    assert [c.message.content for c in again.choices] == [c.message.content for c in whole.choices]
    text, finished, last = {0: "", 1: ""}, {}, None
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    for i, chunk in enumerate(stream):
        last = chunk
        assert chunk.object == "chat.completion.chunk"
        for choice in chunk.choices:
            assert (choice.delta.role == "assistant") == (i < 2)
            text[choice.index] += choice.delta.content or ""
            finished[choice.index] = choice.finish_reason
    assert [text[i] for i in range(2)] == [choice.message.content for choice in whole.choices]
    assert [finished[i] for i in range(2)] == [choice.finish_reason for choice in whole.choices]
    assert (last.choices, last.usage) == ([], whole.usage)


def test_openai_chat_without_a_limit_takes_the_room_there_is(client, tokenizer):
    prompt = tokenizer.apply_chat_template(MESSAGES)
    reply = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply.usage.completion_tokens == min(CONTEXT_LENGTH, POOL_TOKENS) - len(prompt)
    shouted = client.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=1, extra_body={"chat_template_kwargs": {"shout": True}}
    )
    assert shouted.usage.prompt_tokens > len(prompt)


def test_openai_models(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="model: 'other' given, allowed: 'tiny'"):
        client.models.retrieve("other")
    with pytest.raises(openai.NotFoundError, match="model: 'other' given"):
        client.completions.create(model="other", prompt="x")


def test_what_changes_nothing_is_accepted(client):
    reply = client.chat.completions.create(
        model="tiny",
        messages=[*MESSAGES, {"role": "assistant", "content": "cat", "refusal": None}],
        max_tokens=1,
        user="me",
        logit_bias={},
        frequency_penalty=0,
        presence_penalty=0.0,
        response_format={"type": "text"},
        tool_choice="none",
        tools=[],
    )
    assert reply.usage.completion_tokens == 1
