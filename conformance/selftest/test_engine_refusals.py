"""What the HTTP process refuses, each in one line that names the field, what was given and what is allowed."""

from __future__ import annotations

import re

import pytest

from conformance.selftest.tiny_engine import make_tokenizer
from conformance.selftest.tiny_server import call, counting_engine

MESSAGES = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    with counting_engine(make_tokenizer(tmp_path_factory.mktemp("checkpoint"))) as port:
        yield port


COMPLETION = {"prompt": "the"}
CHAT = {"messages": MESSAGES}
REFUSED = [
    ("/generate", b"{", "body: not valid JSON: .*", None),
    ("/generate", [], "body: \\[\\] given, expected object, got array", None),
    ("/generate", {}, "text, input_ids: neither given, exactly one is needed", "text"),
    ("/generate", {"text": "a", "input_ids": [1]}, "text, input_ids: both given, exactly one is needed", "text"),
    ("/generate", {"text": []}, "text: an empty batch given, at least 1 prompt is needed", "text"),
    ("/generate", {"text": ""}, "text: no tokens given, at least 1 is needed", "text"),
    ("/generate", {"input_ids": []}, "input_ids: no tokens given, at least 1 is needed", "input_ids"),
    ("/generate", {"input_ids": [1, [2]]}, "input_ids: lists and ids mixed, allowed: .*", "input_ids"),
    ("/generate", {"input_ids": [300]}, "input_ids: token id 300 given, allowed: 0 to 299", "input_ids"),
    ("/generate", {"input_ids": [[1], [-1]]}, "input_ids: token id -1 given, allowed: 0 to 299", "input_ids"),
    ("/generate", {"text": "a", "strem": True}, "strem: not a known field, allowed: text, input_ids, .*", "strem"),
    (
        "/generate",
        {"text": "a", "sampling_params": {"min_p": 0.1}},
        "sampling_params.min_p: not a known field, allowed: max_new_tokens, .*",
        "sampling_params.min_p",
    ),
    (
        "/generate",
        {"text": "a", "sampling_params": {"top_p": "x"}},
        "sampling_params.top_p: 'x' given, expected float, got str",
        "sampling_params.top_p",
    ),
    ("/generate", {"text": "a", "sampling_params": {"top_k": 0}}, "top_k: 0 given, allowed: -1 .*", "top_k"),
    ("/generate", {"text": "a", "sampling_params": {"stop": [""]}}, "stop: '' given, allowed: .*", "stop"),
    ("/generate", {"text": "a", "top_logprobs_num": 301}, "top_logprobs_num: 301 given, allowed: 0 to 300", None),
    ("/generate", {"text": "a", "logprob_start_len": 9}, "logprob_start_len: 9 given, allowed: -1 to 0 .*", None),
    (
        "/generate",
        {"input_ids": [1] * 40, "sampling_params": {"max_new_tokens": 20}},
        "input_ids: 40 prompt tokens and 20 new ones given, 60 in all, the KV pool holds 48",
        "input_ids",
    ),
    (
        "/generate",
        {"input_ids": [1] * 64},
        "input_ids: 64 prompt tokens and 1 new ones given, 65 in all, the context length is 64",
        "input_ids",
    ),
    ("/v1/completions", {}, "prompt: nothing given, it is required", "prompt"),
    ("/v1/completions", {"prompt": []}, "prompt: none given, at least 1 is needed", "prompt"),
    ("/v1/completions", {"prompt": [1, "a"]}, "prompt: token ids mixed with other prompts, allowed: .*", "prompt"),
    ("/v1/completions", {**COMPLETION, "echo": True}, "echo: True given, which is not supported; .*", "echo"),
    ("/v1/completions", {**COMPLETION, "best_of": 2}, "best_of: 2 given, which is not supported; .*", "best_of"),
    ("/v1/completions", {**COMPLETION, "logit_bias": {"1": 5}}, "logit_bias: {'1': 5} given, .*", "logit_bias"),
    ("/v1/completions", {**COMPLETION, "presence_penalty": 0.5}, "presence_penalty: 0.5 given, .*", "presence_penalty"),
    ("/v1/completions", {**COMPLETION, "n": 0}, "n: 0 given, allowed: 1 to 128", "n"),
    ("/v1/completions", {**COMPLETION, "max_tokens": 0}, "max_tokens: 0 given, allowed: 1 or more", "max_tokens"),
    ("/v1/completions", {**COMPLETION, "seed": 2**63}, "seed: 9223372036854775808 given, allowed: a .*", "seed"),
    ("/v1/completions", {**COMPLETION, "logprobs": -1}, "logprobs: -1 given, allowed: 0 to 300", "logprobs"),
    (
        "/v1/completions",
        {"prompt": [1] * 40, "max_tokens": 9},
        "prompt: 40 prompt tokens and 9 new ones given, 49 in all, the KV pool holds 48",
        "prompt",
    ),
    (
        "/v1/completions",
        {**COMPLETION, "stream_options": {"include_usage": True}},
        "stream_options: given without stream, allowed: with stream true",
        "stream_options",
    ),
    ("/v1/chat/completions", {"messages": []}, "messages: none given, at least 1 is needed", "messages"),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages\\[0\\].role: 'tool' given, allowed: system, developer, user, assistant",
        "messages[0].role",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "developer", "content": "x"}]},
        "messages: the chat template declines them: no developer role",
        "messages",
    ),
    (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages\\[0\\].content\\[0\\].image_url: {'url': 'x'} given, which is not supported; .*",
        "messages[0].content[0].image_url",
    ),
    ("/v1/chat/completions", {**CHAT, "tools": [{}]}, "tools: \\[{}\\] given, which is not supported; .*", "tools"),
    ("/v1/chat/completions", {**CHAT, "response_format": {"type": "json_object"}}, "response_format: .*", None),
    ("/v1/chat/completions", {**CHAT, "top_logprobs": 2}, "top_logprobs: 2 given without logprobs, .*", "top_logprobs"),
    (
        "/v1/chat/completions",
        {**CHAT, "max_tokens": 2, "max_completion_tokens": 3},
        "max_tokens: 2 given, but max_completion_tokens is 3; .*",
        "max_tokens",
    ),
]


@pytest.mark.parametrize(("path", "body", "message", "param"), REFUSED)
def test_what_is_not_served_is_refused_in_one_line(port, path, body, message, param):
    status, reply = call(port, "POST", path, body)
    error = reply["error"]
    assert status == 400, error
    assert re.fullmatch(message, error["message"])
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param


def test_paths_and_methods_that_are_not_served(port):
    status, reply = call(port, "GET", "/v2")
    assert (status, reply["error"]["message"]) == (404, "GET /v2: Not Found")
    status, reply = call(port, "GET", "/generate")
    assert (status, reply["error"]["message"]) == (405, "GET /generate: Method Not Allowed")
