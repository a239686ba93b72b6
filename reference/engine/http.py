"""The HTTP process: its routes, SGLang's `/generate`, and the server that runs them."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from reference.engine.bodies import (
    GenerateBody,
    GenerateSampling,
    check_range,
    check_tokens,
    decode_body,
    make_sampling,
    stop_strings,
)
from reference.engine.client import EngineClient, EngineState, Generated, collect, merge, stream_text
from reference.engine.messages import GenerateRequest, Logprob, RequestRefusal, check_request
from reference.engine.openai_api import chat_completions, completions
from reference.engine.responses import (
    EventStream,
    json_response,
    on_error,
    on_http_exception,
    on_refusal,
    unless_disconnected,
)

__all__ = ["EngineClient", "EngineState", "create_app", "run_server"]

DEFAULT_MAX_NEW_TOKENS = 128


def create_app(client: EngineClient, state: EngineState) -> Starlette:
    """Return the application. It starts the client when it starts up, and stops it, and the ranks, when it shuts down."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        await client.start()
        yield
        await client.stop()

    created = int(time.time())
    serving = [
        Route("/generate", partial(_serve, generate, client, state), methods=["POST"]),
        Route("/v1/completions", partial(_serve, completions, client, state), methods=["POST"]),
        Route("/v1/chat/completions", partial(_serve, chat_completions, client, state), methods=["POST"]),
    ]
    telling = [
        Route("/health", partial(health, client, state)),
        Route("/server_info", partial(server_info, state)),
        Route("/get_server_info", partial(server_info, state)),
        Route("/v1/models", partial(models, state, created)),
        Route("/v1/models/{model:path}", partial(models, state, created)),
    ]
    handlers = {RequestRefusal: on_refusal, HTTPException: on_http_exception, Exception: on_error}
    return Starlette(routes=serving + telling, lifespan=lifespan, exception_handlers=handlers)


async def health(client: EngineClient, state: EngineState, request: Request) -> Response:
    """Say `ready` (200), `loading` or `failed` and why (503)."""
    failure = state.failure or client.failure
    if failure is not None:
        return json_response({"status": "failed", "message": failure}, 503)
    return json_response({"status": "ready"}) if state.ready else json_response({"status": "loading"}, 503)


async def server_info(state: EngineState, request: Request) -> Response:
    """Give what the launcher knows; also while it loads."""
    return json_response(state.server_info())


async def models(state: EngineState, created: int, request: Request) -> Response:
    """List the one model, or describe it."""
    model = {
        "id": state.model_name,
        "object": "model",
        "created": created,
        "owned_by": "reference",
        "max_model_len": state.context_length,
    }
    named = request.path_params.get("model")
    if named is None:
        return json_response({"object": "list", "data": [model]})
    state.check_model(named)
    return json_response(model)


async def _serve(
    endpoint: Callable[[EngineClient, EngineState, Request], Any],
    client: EngineClient,
    state: EngineState,
    request: Request,
) -> Response:
    """Run an endpoint that needs the engine; refuse while it loads and once it has failed."""
    failure = state.failure or client.failure
    if failure is not None:
        raise RequestRefusal(f"the engine has failed: {failure}", code="engine_failed", status=503)
    if not state.ready:
        raise RequestRefusal("the engine is loading; /health says when it is ready", code="loading", status=503)
    response: Response = await endpoint(client, state, request)
    return response


async def generate(client: EngineClient, state: EngineState, request: Request) -> Response:
    """Serve SGLang's `/generate`. In a stream each event has all that was generated so far, as SGLang's have."""
    body = decode_body(await request.body(), GenerateBody)
    given = body.sampling_params or GenerateSampling()
    check_range("top_logprobs_num", body.top_logprobs_num, 0, state.vocab_size)
    prompts, is_batch = _prompts(body, state)
    requests = [_make_request(body, given, prompt, state) for prompt in prompts]
    stop = stop_strings(given.stop)
    streams = [stream_text(client, state.tokenizer, one, stop) for one in requests]

    async def chunks() -> AsyncGenerator[dict[str, Any]]:
        so_far = [Generated() for _ in requests]
        async with aclosing(merge(streams)) as steps:
            async for index, step in steps:
                so_far[index].extend(step)
                reply = _reply(requests[index], so_far[index], state)
                yield {"index": index, **reply} if is_batch else reply

    async def whole() -> Response:
        generated = await collect(streams)
        replies = [_reply(one, result, state) for one, result in zip(requests, generated, strict=True)]
        return json_response(replies if is_batch else replies[0])

    return EventStream(chunks()) if body.stream else await unless_disconnected(request, whole())


def _prompts(body: GenerateBody, state: EngineState) -> tuple[list[tuple[int, ...]], bool]:
    """Return the prompts' tokens, and whether a batch was given."""
    if (body.text is None) == (body.input_ids is None):
        both = "both" if body.text is not None else "neither"
        raise RequestRefusal(f"text, input_ids: {both} given, exactly one is needed", param="text")
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts = [check_tokens(state.tokenizer.encode(text), state.vocab_size, "text") for text in texts]
        is_batch = not isinstance(body.text, str)
    else:
        lists = [ids for ids in body.input_ids or [] if isinstance(ids, list)]
        tokens = [token for token in body.input_ids or [] if isinstance(token, int)]
        if lists and tokens:
            raise RequestRefusal(
                "input_ids: lists and ids mixed, allowed: one list of ids, or lists", param="input_ids"
            )
        prompts = [check_tokens(ids, state.vocab_size, "input_ids") for ids in lists or [tokens]]
        is_batch = bool(lists)
    if not prompts:
        raise RequestRefusal("text: an empty batch given, at least 1 prompt is needed", param="text")
    return prompts, is_batch


def _make_request(
    body: GenerateBody, given: GenerateSampling, prompt: tuple[int, ...], state: EngineState
) -> GenerateRequest:
    default = max(1, min(DEFAULT_MAX_NEW_TOKENS, state.room(len(prompt))))
    sampling = make_sampling(
        {},
        max_new_tokens=default if given.max_new_tokens is None else given.max_new_tokens,
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        sampling_seed=given.sampling_seed,
        ignore_eos=given.ignore_eos,
        stop_token_ids=None if given.stop_token_ids is None else tuple(given.stop_token_ids),
    )
    request = GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=prompt,
        sampling=sampling,
        return_logprob=body.return_logprob,
        logprob_start_len=body.logprob_start_len,
        top_logprobs_num=body.top_logprobs_num,
    )
    check_request(request, state.context_length, state.max_total_tokens, "text" if body.text else "input_ids")
    return request


def _reply(request: GenerateRequest, generated: Generated, state: EngineState) -> dict[str, Any]:
    """Return a request's reply in SGLang's shape."""

    def items(logprobs: list[Logprob]) -> list[tuple[float | None, int, str]]:
        return [(value, token, state.tokenizer.token_text(token)) for value, token in logprobs]

    finish_reason: dict[str, Any] | None = None
    if generated.finish_reason == "length":
        finish_reason = {"type": "length", "length": len(generated.token_ids)}
    elif generated.finish_reason is not None:
        finish_reason = {"type": generated.finish_reason, "matched": generated.matched_stop}
    meta_info: dict[str, Any] = {
        "id": request.rid,
        "finish_reason": finish_reason,
        "prompt_tokens": len(request.input_ids),
        "completion_tokens": len(generated.token_ids),
    }
    if request.return_logprob:
        meta_info["input_token_logprobs"] = items(generated.input_token_logprobs)
        meta_info["output_token_logprobs"] = items(generated.output_token_logprobs)
    if request.return_logprob and request.top_logprobs_num:
        meta_info["input_top_logprobs"] = [items(top) or None for top in generated.input_top_logprobs]
        meta_info["output_top_logprobs"] = [items(top) for top in generated.output_top_logprobs]
    return {"text": generated.text, "output_ids": generated.token_ids, "meta_info": meta_info}


class _Server(uvicorn.Server):
    """Ends by returning: uvicorn's own raises the signal again, so that a clean stop would look like a death."""

    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop, signals = asyncio.get_running_loop(), (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)


def run_server(
    sock: socket.socket, app: Starlette, on_ready: Callable[[], None] = lambda: None, grace_seconds: int = 30
) -> None:
    """Serve on a bound TCP socket, in the main thread, until SIGTERM or SIGINT; then return.

    `on_ready` is called once, in the event loop, when requests are accepted. A stop closes the socket, lets running
    requests and streams end for up to `grace_seconds`, then cancels them. A second SIGINT cancels at once.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="on", ws="none", timeout_graceful_shutdown=grace_seconds
    )
    _Server(config, on_ready).run(sockets=[sock])
