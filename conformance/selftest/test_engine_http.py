"""The HTTP process on a real socket: `/generate`, health, disconnects, failures and the end.

Rank 0 is a real loop over a tiny model, or the test's own hand at the other end of the channel.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import subprocess
import sys
import threading

import pytest

from conformance.selftest.tiny_engine import make_tokenizer
from conformance.selftest.tiny_server import call, counted, counting_engine, events, make_state, open_stream, serving
from reference.engine.channel import Channel
from reference.engine.messages import AbortRequest, EngineRequest, Shutdown, TokenOutput
from reference.engine.responses import EventStream
from reference.engine.tokenizer import Tokenizer


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


@pytest.fixture
def by_hand(tokenizer):
    """A server whose rank 0 is the test: its state, its port, and rank 0's end of the channel."""
    ours, theirs = socket.socketpair()
    rank = Channel[EngineRequest](theirs, EngineRequest)
    state = make_state(tokenizer, ready=True)
    with serving(state, ours) as port:
        yield state, port, rank
    rank.close()


GREEDY = {"temperature": 0, "max_new_tokens": 5}


def test_generate_gives_sglangs_reply(port, tokenizer):
    ids = tokenizer.encode("the cat")
    expected = counted(ids, 5)
    for prompt in ({"text": "the cat"}, {"input_ids": ids}):
        status, reply = call(port, "POST", "/generate", {**prompt, "sampling_params": GREEDY})
        assert status == 200
        assert (reply["text"], reply["output_ids"]) == (tokenizer.decode(expected), expected)
        meta = reply["meta_info"]
        assert meta.pop("id")
        assert meta == {
            "finish_reason": {"type": "length", "length": 5},
            "prompt_tokens": len(ids),
            "completion_tokens": 5,
        }


def test_generate_gives_logprobs_of_prompt_and_output(port, tokenizer):
    body = {
        "input_ids": [10, 20, 30],
        "sampling_params": {"temperature": 0, "max_new_tokens": 2},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
    }
    _, reply = call(port, "POST", "/generate", body)
    meta = reply["meta_info"]

    def texts(items):
        return [tokenizer.decode([token], skip_special_tokens=False) for _, token, _ in items]

    assert [item[1] for item in meta["input_token_logprobs"]] == [10, 20, 30]
    assert [item[1] for item in meta["output_token_logprobs"]] == [31, 32]
    for items in (meta["input_token_logprobs"], meta["output_token_logprobs"]):
        assert [item[2] for item in items] == texts(items)
    # The largest logit is 0, that of token n after the expected one -n, so the sum is that of a geometric series.
    best = -0.4586751
    assert [item[0] for item in meta["input_token_logprobs"]] == [
        None,
        pytest.approx(best - 9, abs=1e-4),
        pytest.approx(best - 9, abs=1e-4),
    ]
    assert [item[0] for item in meta["output_token_logprobs"]] == pytest.approx([best, best], abs=1e-4)
    assert [[t for _, t, _ in top] for top in meta["output_top_logprobs"]] == [[31, 32], [32, 33]]
    assert meta["input_top_logprobs"][0] is None
    assert [[t for _, t, _ in top] for top in meta["input_top_logprobs"][1:]] == [[11, 12], [21, 22]]
    del body["logprob_start_len"]
    _, reply = call(port, "POST", "/generate", body)
    assert [item[:2] for item in reply["meta_info"]["input_token_logprobs"]] == [[None, 30]]


def test_generate_takes_batches_and_streams_all_that_was_generated_so_far(port, tokenizer):
    body = {"input_ids": [[10], [100, 101]], "sampling_params": GREEDY}
    _, replies = call(port, "POST", "/generate", body)
    assert [reply["output_ids"] for reply in replies] == [counted([10], 5), counted([101], 5)]
    connection, response = open_stream(port, "/generate", {**body, "stream": True})
    assert response.getheader("content-type").startswith("text/event-stream")
    seen = {0: [], 1: []}
    for event in events(response):
        seen[event["index"]].append(event)
    connection.close()
    for index, reply in enumerate(replies):
        assert [event["output_ids"] for event in seen[index]] == [reply["output_ids"][: i + 1] for i in range(5)]
        assert seen[index][-1]["text"] == reply["text"]
        finish = [event["meta_info"]["finish_reason"] for event in seen[index]]
        assert finish == [None] * 4 + [{"type": "length", "length": 5}]


def test_a_stop_token_ends_ids_but_not_text(port, tokenizer):
    sampling = {"temperature": 0, "max_new_tokens": 9, "stop_token_ids": [43]}
    _, reply = call(port, "POST", "/generate", {"input_ids": [40], "sampling_params": sampling})
    assert reply["output_ids"] == [41, 42, 43]
    assert reply["text"] == tokenizer.decode([41, 42])
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": 43}


def test_the_models_end_of_sequence_stops_unless_it_is_ignored(port):
    body = {"input_ids": [4], "sampling_params": {"temperature": 0, "max_new_tokens": 5}}
    assert call(port, "POST", "/generate", body)[1]["output_ids"] == [5, 6, 7]
    body["sampling_params"]["ignore_eos"] = True
    assert call(port, "POST", "/generate", body)[1]["output_ids"] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_across_tokens_cuts_the_text_and_frees_the_request(port, tokenizer, stream):
    text = tokenizer.decode(counted([40], 10))
    assert len(text) == 10, "these tokens are single characters"
    sampling = {"temperature": 0, "max_new_tokens": 40, "stop": ["never", text[3:6]]}
    body = {"input_ids": [40], "sampling_params": sampling, "stream": stream}
    if stream:
        connection, response = open_stream(port, "/generate", body)
        replies = list(events(response))
        connection.close()
        assert all(text[:3].startswith(reply["text"]) for reply in replies)
        reply = replies[-1]
    else:
        _, reply = call(port, "POST", "/generate", body)
    assert (reply["text"], reply["output_ids"]) == (text[:3], counted([40], 6))
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": text[3:6]}


def test_health_and_information_while_loading_ready_and_failed(by_hand):
    state, port, _ = by_hand
    state.ready = False
    assert call(port, "GET", "/health") == (503, {"status": "loading"})
    for path in ("/server_info", "/get_server_info"):
        assert call(port, "GET", path) == (200, {"version": "x"})
    status, reply = call(port, "POST", "/generate", {"text": "a"})
    assert (status, reply["error"]["code"]) == (503, "loading")
    state.ready = True
    assert call(port, "GET", "/health") == (200, {"status": "ready"})
    state.failure = "rank 1 ended"
    assert call(port, "GET", "/health") == (503, {"status": "failed", "message": "rank 1 ended"})
    status, reply = call(port, "POST", "/v1/completions", {"prompt": "the"})
    assert (status, reply["error"]["message"]) == (503, "the engine has failed: rank 1 ended")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_aborts_its_request(by_hand, stream):
    _, port, rank = by_hand
    body = json.dumps({"input_ids": [1], "stream": stream}).encode()
    head = f"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(head + body)
        request = rank.receive()
        rank.send(TokenOutput(request.rid, [2]))
        if stream:
            received = b""
            while b"data: " not in received:
                received += connection.recv(4096)
    assert rank.receive() == AbortRequest(request.rid)
    # Outputs that were on their way are for nobody, and the next request is served.
    rank.send(TokenOutput(request.rid, [3]))
    connection, response = open_stream(port, "/generate", {"input_ids": [5], "stream": True})
    following = rank.receive()
    assert following.input_ids == (5,)
    rank.send(TokenOutput(following.rid, [6], "length"))
    assert [event["output_ids"] for event in events(response)] == [[6]]
    connection.close()


def test_a_client_that_goes_while_it_is_being_sent_to_closes_the_stream_at_once():
    closed = asyncio.Event()

    async def chunks():
        try:
            yield {}
        finally:
            closed.set()

    async def disconnect_while_sending():
        stream, sending = chunks(), asyncio.Event()

        async def send(message):
            if message["type"] == "http.response.body":
                sending.set()
                await asyncio.Event().wait()

        async def receive():
            await sending.wait()
            return {"type": "http.disconnect"}

        await EventStream(stream)({"type": "http"}, receive, send)
        # The stream is still referred to, so that it was not closed by being collected.
        assert closed.is_set()
        await stream.aclose()

    asyncio.run(disconnect_while_sending())


def test_the_engines_end_fails_what_runs_and_what_comes(by_hand):
    _, port, rank = by_hand
    connection, response = open_stream(port, "/generate", {"input_ids": [1], "stream": True})
    request = rank.receive()
    rank.send(TokenOutput(request.rid, [2]))
    stream = events(response)
    assert next(stream)["output_ids"] == [2]
    rank.close()
    error = next(stream)["error"]
    assert (error["code"], error["message"]) == ("engine_failed", "the engine has failed: rank 0 has ended")
    assert list(stream) == []
    connection.close()
    assert call(port, "GET", "/health") == (503, {"status": "failed", "message": "rank 0 has ended"})
    status, reply = call(port, "POST", "/generate", {"text": "a"})
    assert (status, reply["error"]["code"], reply["error"]["type"]) == (503, "engine_failed", "server_error")


@pytest.mark.parametrize("bad_frame", [b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x80"])
def test_an_output_that_can_not_be_read_fails_the_engine_at_once(by_hand, bad_frame):
    _, port, rank = by_hand
    connection, response = open_stream(port, "/generate", {"input_ids": [1], "stream": True})
    rank.receive()
    with socket.fromfd(rank.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.sendall(bad_frame)
    (event,) = events(response)
    assert "rank 0 sent what is no output" in event["error"]["message"]
    connection.close()


def test_an_aborted_request_is_a_server_error(by_hand):
    _, port, rank = by_hand

    def answer():
        rank.send(TokenOutput(rank.receive().rid, [], "abort", message="the logits are bad"))

    thread = threading.Thread(target=answer)
    thread.start()
    status, reply = call(port, "POST", "/generate", {"text": "a"})
    thread.join()
    assert (status, reply["error"]["message"]) == (500, "aborted: the logits are bad")


SERVER = """
import socket, sys
from reference.engine.http import EngineClient, EngineState, create_app, run_server
from reference.engine.responses import EventStream
from reference.engine.tokenizer import Tokenizer
listener, requests = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
state = EngineState("tiny", Tokenizer.load(sys.argv[3]), 300, 64, 48, dict, ready=True)
run_server(listener, create_app(EngineClient(requests), state), lambda: print("ready", flush=True))
print("returned", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_lets_streams_end_and_then_the_ranks(directory, number):
    ours, theirs = socket.socketpair()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    fds = (listener.fileno(), theirs.fileno())
    command = [sys.executable, "-c", SERVER, *map(str, fds), str(directory)]
    with subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        listener.close()
        theirs.close()
        assert server.stdout.readline() == "ready\n"
        rank = Channel[EngineRequest](ours, EngineRequest)
        connection, response = open_stream(port, "/generate", {"input_ids": [1], "stream": True})
        request = rank.receive()
        rank.send(TokenOutput(request.rid, [2]))
        stream = events(response)
        assert next(stream)["output_ids"] == [2]
        idle = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ready"}'
        server.send_signal(number)
        assert idle.sock.recv(1) == b"", "a stop closes connections that wait for nothing"
        idle.close()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port))
        rank.send(TokenOutput(request.rid, [3], "length"))
        assert next(stream)["output_ids"] == [2, 3]
        assert list(stream) == []
        connection.close()
        assert rank.receive() == Shutdown()
        assert rank.receive() is None
        out, err = server.communicate(timeout=60)
    rank.close()
    assert (out, err, server.returncode) == ("returned\n", "", 0)
