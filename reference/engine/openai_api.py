"""OpenAI's `/v1/completions` and `/v1/chat/completions`, whole and streamed."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from reference.engine.bodies import (
    ChatBody,
    ChatMessage,
    CompletionBody,
    check_range,
    check_tokens,
    decode_body,
    make_sampling,
    refuse_unsupported,
    stop_strings,
)
from reference.engine.client import EngineClient, EngineState, Generated, collect, merge, stream_text
from reference.engine.messages import GenerateRequest, RequestRefusal, check_request
from reference.engine.responses import EventStream, json_response, unless_disconnected
from reference.engine.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
MAX_CHOICES = 128
_ROLES = ("system", "developer", "user", "assistant")


class MakeChoice(Protocol):
    """Makes a choice's part of a reply, of all that was generated or of one step of a stream."""

    def __call__(self, index: int, generated: Generated, streamed: bool) -> dict[str, Any]:
        """Return the entry of `choices`."""


@dataclass(frozen=True)
class _Call:
    """A checked call: `choices` requests a prompt, prompt after prompt. `top_logprobs` None: no log-probabilities."""

    kind: str
    requests: list[GenerateRequest]
    choices: int
    stop: tuple[str, ...]
    top_logprobs: int | None
    stream: bool
    include_usage: bool


async def completions(client: EngineClient, state: EngineState, request: Request) -> Response:
    """Serve `/v1/completions`."""
    body = decode_body(await request.body(), CompletionBody)
    prompts = _completion_prompts(body, state)
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, state.vocab_size)
    max_tokens = ("max_tokens", DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens)
    call = _make_call("text_completion", body, state, prompts, "prompt", max_tokens, body.logprobs)
    offsets = [0] * len(call.requests)

    def choice(index: int, generated: Generated, streamed: bool) -> dict[str, Any]:
        logprobs = None
        if call.top_logprobs is not None:
            logprobs = _completion_logprobs(generated, state.tokenizer, offsets[index], call.top_logprobs)
            offsets[index] += sum(map(len, logprobs["tokens"]))
        return {"index": index, "text": generated.text, "logprobs": logprobs, **_finish(generated)}

    return await _respond(client, state, request, call, choice)


async def chat_completions(client: EngineClient, state: EngineState, request: Request) -> Response:
    """Serve `/v1/chat/completions`."""
    body = decode_body(await request.body(), ChatBody)
    refuse_unsupported(body)
    messages = [_chat_message(message, f"messages[{i}].") for i, message in enumerate(body.messages)]
    if not messages:
        raise RequestRefusal("messages: none given, at least 1 is needed", param="messages")
    ids = state.tokenizer.apply_chat_template(messages, **(body.chat_template_kwargs or {}))
    top_logprobs = _chat_top_logprobs(body, state)
    prompts = [check_tokens(ids, state.vocab_size, "messages")]
    call = _make_call("chat.completion", body, state, prompts, "messages", _chat_max_tokens(body), top_logprobs)

    def choice(index: int, generated: Generated, streamed: bool) -> dict[str, Any]:
        logprobs = None
        if call.top_logprobs is not None:
            logprobs = {"content": _chat_logprobs(generated, state.tokenizer), "refusal": None}
        if streamed:
            said: dict[str, Any] = {"delta": {"content": generated.text} if generated.text else {}}
        else:
            said = {"message": {"role": "assistant", "content": generated.text, "refusal": None}}
        return {"index": index, **said, "logprobs": logprobs, **_finish(generated)}

    return await _respond(client, state, request, call, choice)


async def _respond(
    client: EngineClient, state: EngineState, request: Request, call: _Call, choice: MakeChoice
) -> Response:
    prefix = "chatcmpl" if call.kind == "chat.completion" else "cmpl"
    header = {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": state.model_name}
    streams = [stream_text(client, state.tokenizer, one, call.stop) for one in call.requests]

    async def chunks() -> AsyncGenerator[dict[str, Any]]:
        kind = "chat.completion.chunk" if call.kind == "chat.completion" else call.kind
        head = {**header, "object": kind} | ({"usage": None} if call.include_usage else {})
        completion_tokens = 0
        if call.kind == "chat.completion":
            for index in range(len(streams)):
                delta = {"role": "assistant", "content": ""}
                yield {**head, "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]}
        async with aclosing(merge(streams)) as steps:
            async for index, step in steps:
                completion_tokens += len(step.token_ids)
                # A step can be without text, when a character or a possible stop string is not complete.
                if step.text or step.finish_reason is not None or call.top_logprobs is not None:
                    yield {**head, "choices": [choice(index, step, True)]}
        if call.include_usage:
            yield {**head, "choices": [], "usage": _usage(call, completion_tokens)}

    async def whole() -> Response:
        generated = await collect(streams)
        choices = [choice(index, result, False) for index, result in enumerate(generated)]
        usage = _usage(call, sum(len(result.token_ids) for result in generated))
        return json_response({**header, "object": call.kind, "choices": choices, "usage": usage})

    return EventStream(chunks()) if call.stream else await unless_disconnected(request, whole())


def _make_call(
    kind: str,
    body: CompletionBody | ChatBody,
    state: EngineState,
    prompts: Sequence[tuple[int, ...]],
    prompt_param: str,
    max_tokens: tuple[str, int | None],
    top_logprobs: int | None,
) -> _Call:
    """Check what both endpoints share. `max_tokens`: the parameter's name, and its value, None for all there is room for."""
    refuse_unsupported(body)
    state.check_model(body.model)
    choices = 1 if body.n is None else body.n
    check_range("n", choices, 1, MAX_CHOICES)
    if body.stream_options is not None and not body.stream:
        raise RequestRefusal("stream_options: given without stream, allowed: with stream true", param="stream_options")
    requests = []
    for prompt in prompts:
        for number in range(choices):
            name, limit = max_tokens
            sampling = make_sampling(
                {"max_new_tokens": name, "sampling_seed": "seed"},
                max_new_tokens=max(1, state.room(len(prompt))) if limit is None else limit,
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=body.top_k,
                sampling_seed=_choice_seed(body.seed, number),
                ignore_eos=body.ignore_eos,
                stop_token_ids=None if body.stop_token_ids is None else tuple(body.stop_token_ids),
            )
            request = GenerateRequest(
                rid=uuid.uuid4().hex,
                input_ids=prompt,
                sampling=sampling,
                return_logprob=top_logprobs is not None,
                top_logprobs_num=top_logprobs or 0,
            )
            check_request(request, state.context_length, state.max_total_tokens, prompt_param)
            requests.append(request)
    return _Call(
        kind=kind,
        requests=requests,
        choices=choices,
        stop=stop_strings(body.stop),
        top_logprobs=top_logprobs,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
    )


def _choice_seed(seed: int | None, number: int) -> int | None:
    """Return a choice's seed: choices of one seed differ from each other, and are the same each time."""
    return seed if seed is None or number == 0 else (seed + number + 2**63) % 2**64 - 2**63


def _completion_prompts(body: CompletionBody, state: EngineState) -> list[tuple[int, ...]]:
    """Return the prompts' tokens: of a text, of texts, of token ids, or of lists of them."""
    given: list[str | int | list[int]] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    tokens = [item for item in given if isinstance(item, int)]
    prompts = []
    for item in [tokens] if tokens and len(tokens) == len(given) else given:
        if isinstance(item, int):
            message = (
                "prompt: token ids mixed with other prompts, allowed: a text, texts, token ids, or lists of token ids"
            )
            raise RequestRefusal(message, param="prompt")
        ids = state.tokenizer.encode(item) if isinstance(item, str) else item
        prompts.append(check_tokens(ids, state.vocab_size, "prompt"))
    if not prompts:
        raise RequestRefusal("prompt: none given, at least 1 is needed", param="prompt")
    return prompts


def _chat_message(message: ChatMessage, path: str) -> dict[str, Any]:
    """Return a message as chat templates expect it."""
    refuse_unsupported(message, path)
    if message.role not in _ROLES:
        allowed = ", ".join(_ROLES)
        raise RequestRefusal(f"{path}role: {message.role!r} given, allowed: {allowed}", param=f"{path}role")
    content = message.content
    if isinstance(content, list):
        for i, part in enumerate(content):
            refuse_unsupported(part, f"{path}content[{i}].")
            if part.type != "text" or part.text is None:
                param = f"{path}content[{i}].type"
                raise RequestRefusal(f"{param}: {part.type!r} given, allowed: 'text', with a text", param=param)
        content = "".join(part.text or "" for part in content)
    if content is None:
        raise RequestRefusal(f"{path}content: nothing given, a text is needed", param=f"{path}content")
    return {"role": message.role, "content": content} | ({} if message.name is None else {"name": message.name})


def _chat_max_tokens(body: ChatBody) -> tuple[str, int | None]:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        message = f"max_tokens: {old} given, but max_completion_tokens is {new}; allowed: one of them, or equal values"
        raise RequestRefusal(message, param="max_tokens")
    return ("max_completion_tokens", new) if new is not None else ("max_tokens", old)


def _chat_top_logprobs(body: ChatBody, state: EngineState) -> int | None:
    if body.top_logprobs is None:
        return 0 if body.logprobs else None
    check_range("top_logprobs", body.top_logprobs, 0, state.vocab_size)
    if not body.logprobs:
        message = f"top_logprobs: {body.top_logprobs} given without logprobs, allowed: with logprobs true"
        raise RequestRefusal(message, param="top_logprobs")
    return body.top_logprobs


def _finish(generated: Generated) -> dict[str, Any]:
    return {"finish_reason": generated.finish_reason, "matched_stop": generated.matched_stop}


def _usage(call: _Call, completion_tokens: int) -> dict[str, int]:
    # A prompt counts once, however many choices it was continued to.
    prompt_tokens = sum(len(request.input_ids) for request in call.requests[:: call.choices])
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}


def _completion_logprobs(generated: Generated, tokenizer: Tokenizer, offset: int, top: int) -> dict[str, Any]:
    tokens = [tokenizer.token_text(token) for token in generated.token_ids]
    offsets = [offset + sum(map(len, tokens[:i])) for i in range(len(tokens))]
    tops = []
    for entries in generated.output_top_logprobs:
        # Tokens with the same text share a key; going from the least likely, the likeliest stays.
        tops.append({tokenizer.token_text(t): value for value, t in reversed(entries)})
    return {
        "tokens": tokens,
        "token_logprobs": [value for value, _ in generated.output_token_logprobs],
        "top_logprobs": tops if top else None,
        "text_offset": offsets,
    }


def _chat_logprobs(generated: Generated, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    def entry(value: float | None, token: int) -> dict[str, Any]:
        text = tokenizer.token_text(token)
        # A token can be part of a character, whose bytes the text doesn't show.
        return {"token": text, "logprob": value, "bytes": None if "\ufffd" in text else list(text.encode())}

    return [
        {**entry(*own), "top_logprobs": [entry(*other) for other in top]}
        for own, top in zip(generated.output_token_logprobs, generated.output_top_logprobs, strict=True)
    ]
