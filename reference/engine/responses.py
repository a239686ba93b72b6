"""Answers of the HTTP process: JSON, server-sent events, and errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Send

from reference.engine.messages import RequestRefusal


def json_response(content: Any, status: int = 200) -> Response:
    """Return a JSON response of whatever msgspec encodes."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def error_body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def on_refusal(request: Request, refusal: Exception) -> Response:
    """Answer a `RequestRefusal`."""
    assert isinstance(refusal, RequestRefusal)
    return json_response(_refusal_body(refusal), refusal.status)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """Answer a path or a method that is not served."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = json_response(error_body(message, error.status_code), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def on_error(request: Request, error: Exception) -> Response:
    """Answer a bug; its traceback is logged by the server."""
    return json_response(error_body(f"internal error: {type(error).__name__}: {error}", 500), 500)


def _refusal_body(refusal: RequestRefusal) -> dict[str, Any]:
    return error_body(str(refusal), refusal.status, refusal.param, refusal.code)


class EventStream(StreamingResponse):
    """Server-sent events, one a chunk, then `[DONE]`. A refusal on the way is sent as an event, and ends the stream.

    When the client disconnects, `chunks` is closed at once.
    """

    def __init__(self, chunks: AsyncGenerator[Any]) -> None:
        super().__init__(self._events(chunks), media_type="text/event-stream", headers={"cache-control": "no-cache"})

    async def stream_response(self, send: Send) -> None:
        """Send the events; close the generators on every way out, not when they happen to be collected."""
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await super().stream_response(send)

    @staticmethod
    async def _events(chunks: AsyncGenerator[Any]) -> AsyncGenerator[bytes]:
        async with aclosing(chunks):
            try:
                async for chunk in chunks:
                    yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
            except RequestRefusal as refusal:
                yield b"data: " + msgspec.json.encode(_refusal_body(refusal)) + b"\n\n"
            yield b"data: [DONE]\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return what `work` returns; cancel it when the client disconnects. The body must have been read."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watcher = asyncio.create_task(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait([task, watcher], return_when=asyncio.FIRST_COMPLETED)
        # Nobody reads the answer to a client that is gone.
        return task.result() if task.done() else Response(status_code=499)
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
