"""The HTTP process's view of the engine: its state, and a client that shares the channel to rank 0 among requests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from reference.engine.channel import AsyncChannel
from reference.engine.detokenizer import Detokenizer, StopStrings
from reference.engine.messages import (
    AbortRequest,
    GenerateRequest,
    Logprob,
    RequestRefusal,
    Shutdown,
    TokenOutput,
)
from reference.engine.tokenizer import Tokenizer

Item = TypeVar("Item")


@dataclass
class EngineState:
    """What the HTTP process knows of the engine. The launcher fills it and sets `ready` or `failure` as things happen.

    vocab_size: the model's, without padding. context_length: longest sequence. max_total_tokens: what the KV pool holds.
    server_info: makes the body of `/server_info`. failure: why nothing is served any more, one line.
    """

    model_name: str
    tokenizer: Tokenizer
    vocab_size: int
    context_length: int
    max_total_tokens: int
    server_info: Callable[[], dict[str, Any]]
    ready: bool = False
    failure: str | None = None

    def room(self, prompt_tokens: int) -> int:
        """Return how many tokens can be generated after a prompt at the most."""
        return min(self.context_length, self.max_total_tokens) - prompt_tokens

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name is not None and name != self.model_name:
            message = f"model: {name!r} given, allowed: {self.model_name!r}"
            raise RequestRefusal(message, param="model", code="model_not_found", status=404)


@dataclass
class Generated:
    """What was generated for a request: by one step, or up to now. Lists as in `TokenOutput`; `text` ends before a stop.

    `matched_stop` is the stop token or the stop string.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    matched_stop: int | str | None = None
    output_token_logprobs: list[Logprob] = field(default_factory=list)
    output_top_logprobs: list[list[Logprob]] = field(default_factory=list)
    input_token_logprobs: list[Logprob] = field(default_factory=list)
    input_top_logprobs: list[list[Logprob]] = field(default_factory=list)

    def extend(self, step: Generated) -> None:
        """Add what the next step brought."""
        self.text += step.text
        self.token_ids += step.token_ids
        self.finish_reason, self.matched_stop = step.finish_reason, step.matched_stop
        self.output_token_logprobs += step.output_token_logprobs
        self.output_top_logprobs += step.output_top_logprobs
        self.input_token_logprobs += step.input_token_logprobs
        self.input_top_logprobs += step.input_top_logprobs


class EngineClient:
    """Sends requests to rank 0 and gives each its own answers. `failure` says why it can't any more, once that is so."""

    def __init__(self, sock: socket.socket) -> None:
        """Take a connected Unix stream socket to rank 0; nothing is sent before `start`."""
        self.failure: str | None = None
        self._sock = sock
        self._channel: AsyncChannel[TokenOutput] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._outputs: dict[str, asyncio.Queue[TokenOutput | None]] = {}

    async def start(self) -> None:
        """Begin to read, in the running loop."""
        self._channel = await AsyncChannel.open(self._sock, TokenOutput)
        self._reader = asyncio.create_task(self._read(self._channel))

    async def stop(self) -> None:
        """Tell the ranks to end, and close the channel."""
        assert self._channel is not None
        assert self._reader is not None
        if self.failure is None:
            self.failure = "it is being stopped"
            self._channel.send(Shutdown())
        self._reader.cancel()
        await asyncio.wait([self._reader])
        await self._channel.close()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput]:
        """Yield a request's outputs, the last one with its finish reason. Closing it early aborts the request.

        Raises `RequestRefusal` where the engine aborts it, or is gone.
        """
        assert self._channel is not None
        if self.failure is not None:
            raise self._gone()
        outputs: asyncio.Queue[TokenOutput | None] = asyncio.Queue()
        self._outputs[request.rid] = outputs
        self._channel.send(request)
        ended = False
        try:
            while not ended:
                output = await outputs.get()
                ended = output is None or output.finish_reason is not None
                if output is None:
                    raise self._gone()
                if output.finish_reason == "abort":
                    raise RequestRefusal(f"aborted: {output.message}", code="aborted", status=500)
                yield output
        finally:
            del self._outputs[request.rid]
            if not ended:
                self._channel.send(AbortRequest(request.rid))

    async def _read(self, channel: AsyncChannel[TokenOutput]) -> None:
        try:
            while (output := await channel.receive()) is not None:
                # An aborted request's last outputs may still be on their way.
                if output.rid in self._outputs:
                    self._outputs[output.rid].put_nowait(output)
            self.failure = self.failure or "rank 0 has ended"
        except msgspec.MsgspecError as error:
            self.failure = f"rank 0 sent what is no output: {error}"
        finally:
            for outputs in self._outputs.values():
                outputs.put_nowait(None)

    def _gone(self) -> RequestRefusal:
        return RequestRefusal(f"the engine has failed: {self.failure}", code="engine_failed", status=503)


async def stream_text(
    client: EngineClient, tokenizer: Tokenizer, request: GenerateRequest, stop: Sequence[str]
) -> AsyncGenerator[Generated]:
    """Yield what each step of a request generates; at a stop string the request is aborted and ends with reason `stop`."""
    detokenizer, stop_strings = Detokenizer(tokenizer), StopStrings(stop)
    async with aclosing(client.generate(request)) as outputs:
        async for output in outputs:
            # The token that stopped the sequence belongs to the ids, not to the text.
            stopped = output.matched_stop is not None
            text = detokenizer.push(output.token_ids[:-1] if stopped else output.token_ids)
            if output.finish_reason is not None:
                text += detokenizer.finish()
            text, matched = stop_strings.push(text)
            if output.finish_reason is not None and matched is None:
                text += stop_strings.finish()
            yield Generated(
                text=text,
                token_ids=output.token_ids,
                finish_reason=output.finish_reason if matched is None else "stop",
                matched_stop=output.matched_stop if matched is None else matched,
                output_token_logprobs=output.output_token_logprobs,
                output_top_logprobs=output.output_top_logprobs,
                input_token_logprobs=output.input_token_logprobs,
                input_top_logprobs=output.input_top_logprobs,
            )
            if matched is not None:
                return


async def collect(streams: Sequence[AsyncGenerator[Generated]]) -> list[Generated]:
    """Run the streams to their ends; return all that each generated."""
    collected = [Generated() for _ in streams]
    async with aclosing(merge(streams)) as steps:
        async for index, step in steps:
            collected[index].extend(step)
    return collected


async def merge(streams: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[tuple[int, Item]]:
    """Yield `(index of the stream, item)` as items come. The first error ends all; closing it early closes them."""
    items: asyncio.Queue[tuple[int, Item | None, Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(stream):
                async for item in stream:
                    items.put_nowait((index, item, None))
            items.put_nowait((index, None, None))
        except Exception as error:
            items.put_nowait((index, None, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item, error = await items.get()
            if error is not None:
                raise error
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
