"""The HTTP process on a real socket over a tiny engine, and a client that is simple enough to be trusted."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from contextlib import contextmanager

import torch
import uvicorn

from conformance.selftest.tiny_engine import VOCAB_SIZE, CountingModel
from reference.engine.channel import Channel
from reference.engine.http import EngineClient, EngineState, create_app
from reference.engine.kv import BlockPool, KVCache
from reference.engine.messages import EngineRequest
from reference.engine.scheduler import Scheduler
from reference.engine.tokenizer import Tokenizer, eos_token_ids
from reference.engine.worker import run_worker

CONTEXT_LENGTH = 64
POOL_TOKENS = 48


def make_state(tokenizer, **fields):
    """Return the state of an engine that serves the tiny model."""
    return EngineState("tiny", tokenizer, VOCAB_SIZE, CONTEXT_LENGTH, POOL_TOKENS, lambda: {"version": "x"}, **fields)


@contextmanager
def serving(state, requests):
    """Run the application on a loopback port in a thread; yield the port. `requests` is the channel to rank 0."""
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    config = uvicorn.Config(create_app(EngineClient(requests), state), log_config=None, lifespan="on", ws="none")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    try:
        yield port
    finally:
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def counting_engine(directory):
    """Serve the counting model with a real rank 0 in a thread; yield the port."""
    ours, theirs = socket.socketpair()
    scheduler = Scheduler(BlockPool(POOL_TOKENS // 4, 4), 8, 32, CONTEXT_LENGTH, eos_token_ids(directory))
    cache = KVCache.allocate(1, POOL_TOKENS // 4, 4, 1, 1, torch.float32)
    channel = Channel[EngineRequest](theirs, EngineRequest)

    def run():
        run_worker(CountingModel(), cache, scheduler, channel, lambda data: data, vocab_size=VOCAB_SIZE)
        channel.close()

    rank = threading.Thread(target=run)
    rank.start()
    with serving(make_state(Tokenizer.load(directory), ready=True), ours) as port:
        yield port
    rank.join(60)
    assert not rank.is_alive(), "the server's end must end the ranks"


def call(port, method, path, body=None):
    """Return status and decoded JSON of one request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method, path, data)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content)


def open_stream(port, path, body):
    """Start a request; return its connection and response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(body).encode())
    return connection, connection.getresponse()


def events(response):
    """Yield the data of each server-sent event; the last must be `[DONE]`, with the blank line after it."""
    for line in iter(response.readline, b""):
        assert line.startswith(b"data: ")
        assert response.readline() == b"\n"
        if line == b"data: [DONE]\n":
            assert response.read() == b""
            return
        yield json.loads(line.removeprefix(b"data: "))
    raise AssertionError("the stream ended without [DONE]")


def counted(ids, count):
    """Return what the counting model continues ids with."""
    return [(ids[-1] + 1 + i) % VOCAB_SIZE for i in range(count)]
