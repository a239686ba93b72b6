"""Messages check themselves, and arrive whole and in order over a channel."""

from __future__ import annotations

import asyncio
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.engine.channel import AsyncChannel, Channel, encode_frame
from reference.engine.messages import (
    MAX_TOP_LOGPROBS,
    AbortRequest,
    EngineRequest,
    GenerateRequest,
    RequestRefusal,
    SamplingParams,
    Shutdown,
    TokenOutput,
    check_request,
)


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("max_new_tokens", 0, "1 or more"),
        ("temperature", -0.1, "0 to 1000000"),
        ("temperature", float("nan"), "0 to 1000000"),
        ("top_p", 0.0, "above 0, up to 1"),
        ("top_p", 1.5, "above 0, up to 1"),
        ("top_k", 0, "-1 (all) or 1 to 2147483647"),
        ("sampling_seed", 2**63, "a signed 64-bit integer"),
        ("stop_token_ids", (3, -1), "token ids, 0 to 2147483647"),
    ],
)
def test_sampling_params_name_field_given_and_allowed(field, value, allowed):
    with pytest.raises(RequestRefusal) as refused:
        SamplingParams(**{field: value})
    given = [-1] if field == "stop_token_ids" else value
    assert str(refused.value) == f"{field}: {given} given, allowed: {allowed}"
    assert refused.value.param == field


def test_what_arrives_is_checked_too():
    frame = msgspec.msgpack.encode({"type": "generate", "rid": "a", "input_ids": [1], "sampling": {"top_k": 0}})
    with pytest.raises(RequestRefusal, match="top_k: 0 given"):
        msgspec.msgpack.decode(frame, type=GenerateRequest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": ()}, "input_ids: no tokens given, at least 1 is needed"),
        (
            {"input_ids": (1,) * 30},
            "input_ids: 30 prompt tokens and 10 new ones given, 40 in all, the KV pool holds 32",
        ),
        (
            {"input_ids": (1,) * 60},
            "input_ids: 60 prompt tokens and 10 new ones given, 70 in all, the context length is 64",
        ),
        ({"logprob_start_len": 5}, "logprob_start_len: 5 given, allowed: -1 to 4 for this prompt"),
        ({"logprob_start_len": -2}, "logprob_start_len: -2 given, allowed: -1 to 4 for this prompt"),
        (
            {"top_logprobs_num": MAX_TOP_LOGPROBS},
            f"top_logprobs_num: {MAX_TOP_LOGPROBS} given, allowed: 0 to {MAX_TOP_LOGPROBS // 11} for 11 positions",
        ),
    ],
)
def test_check_request_refuses_what_can_never_run(changes, message):
    fields = {"rid": "a", "input_ids": (1,) * 5, "sampling": SamplingParams(max_new_tokens=10)}
    check_request(GenerateRequest(**fields), 64, 32)
    with pytest.raises(RequestRefusal) as refused:
        check_request(GenerateRequest(**(fields | changes)), 64, 32)
    assert str(refused.value) == message


def test_a_request_that_fits_exactly_is_accepted():
    request = GenerateRequest("a", (1,) * 22, SamplingParams(max_new_tokens=10))
    check_request(request, 32, 32)
    with pytest.raises(RequestRefusal, match="context length is 31"):
        check_request(request, 31, 32)


messages = st.one_of(
    st.builds(
        GenerateRequest,
        rid=st.text(max_size=8),
        input_ids=st.lists(st.integers(0, 2**31), max_size=40).map(tuple),
        sampling=st.builds(SamplingParams, sampling_seed=st.none() | st.integers(-(2**63), 2**63 - 1)),
    ),
    st.builds(AbortRequest, rid=st.text(max_size=300)),
    st.just(Shutdown()),
)


@given(sent=st.lists(messages, max_size=6), sizes=st.lists(st.integers(1, 90), min_size=1))
def test_frames_survive_any_fragmentation(sent, sizes):
    ours, theirs = socket.socketpair()
    with ours:
        channel = Channel[EngineRequest](theirs, EngineRequest)
        stream, received, i = b"".join(map(encode_frame, sent)), [], 0
        while stream:
            piece, stream = stream[: sizes[i % len(sizes)]], stream[sizes[i % len(sizes)] :]
            ours.sendall(piece)
            received += channel.receive_ready()
            i += 1
        assert received == sent
        assert channel.receive_ready() == []
        assert not channel.closed
        channel.close()


def test_receive_waits_and_ends_with_the_peer():
    ours, theirs = (Channel[EngineRequest](sock, EngineRequest) for sock in socket.socketpair())
    received = []

    def read():
        while (message := theirs.receive()) is not None:
            received.append(message)

    reader = threading.Thread(target=read)
    reader.start()
    sent = [AbortRequest("a"), GenerateRequest("b", tuple(range(100_000))), Shutdown()]
    for message in sent:
        ours.send(message)
    ours.close()
    reader.join()
    assert received == sent
    assert theirs.closed
    theirs.send(Shutdown())
    theirs.close()


def test_a_frame_torn_by_the_peers_death_is_its_end():
    ours, theirs = socket.socketpair()
    channel = Channel[EngineRequest](theirs, EngineRequest)
    ours.sendall(encode_frame(AbortRequest("a")) + encode_frame(Shutdown())[:-1])
    ours.close()
    assert channel.receive() == AbortRequest("a")
    assert channel.receive() is None
    channel.close()


def test_sending_to_a_peer_that_is_gone_closes_the_channel():
    ours, theirs = socket.socketpair()
    channel = Channel[EngineRequest](ours, EngineRequest)
    theirs.close()
    assert not channel.closed
    channel.send(Shutdown())
    assert channel.closed
    channel.close()


def test_the_two_sides_speak_the_same_frames():
    async def converse() -> None:
        ours, theirs = socket.socketpair()
        rank = Channel[EngineRequest](theirs, EngineRequest)
        client = await AsyncChannel[TokenOutput].open(ours, TokenOutput)
        client.send(AbortRequest("a"))
        client.send(Shutdown())
        assert await asyncio.to_thread(lambda: [rank.receive(), rank.receive()]) == [AbortRequest("a"), Shutdown()]
        output = TokenOutput("a", [1], "stop", 1, None, [(-0.5, 1)], [[(-0.5, 1)]], [(None, 3)], [[]])
        rank.send(output)
        assert await client.receive() == output
        rank.close()
        assert await client.receive() is None
        await client.close()

    asyncio.run(converse())
