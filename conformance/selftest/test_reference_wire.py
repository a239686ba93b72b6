"""The wire, against a daemon that is a process of its own: what a peer may do wrong, and what it can't do to others."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import select
import signal
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from conformance.selftest import tiny
from conformance.selftest.reference_process import Workshop, open_workshop
from reference.cache import registry
from reference.cache.daemon import DaemonRank

HEADER = struct.Struct("!4sHHI")
MAX_FRAME = 1 << 20


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    with open_workshop() as workshop:
        yield workshop


@pytest.fixture(scope="module")
def daemon(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[registry.Place]:
    """The place of a daemon that is ready; it must be there, and stop cleanly, when all is over."""
    process = workshop.daemon(tiny.write(tmp_path_factory.mktemp("model"), tiny.SPARSE))
    (place,) = (registry.Place(path) for path in (workshop.registry / "cpu-0").iterdir())
    yield place
    assert process.stop().clean
    assert workshop.left_over() == []


class Peer:
    """A connection that says what it likes."""

    def __init__(self, place: registry.Place) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(str(place.socket))
        self.descriptors: list[int] = []

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()
        while self.descriptors:
            os.close(self.descriptors.pop())

    def send(self, data: bytes) -> None:
        # A daemon that has heard enough hangs up in the middle.
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(data)

    def say(self, message: object) -> None:
        self.send(frame(msgspec.msgpack.encode(message)))

    def hear(self) -> dict[str, Any]:
        head = self._read(HEADER.size)
        magic, version, zero, length = HEADER.unpack(head)
        assert (magic, version, zero) == (b"wcp1", 1, 0)
        assert length <= MAX_FRAME
        return dict(msgspec.msgpack.decode(self._read(length)))

    def ask(self, message: object) -> dict[str, Any]:
        self.say(message)
        return self.hear()

    def is_closed(self) -> bool:
        """Wait for the daemon to hang up; False where it says something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _read(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part, descriptors, _, _ = socket.recv_fds(self.socket, count - len(data), 8)
            self.descriptors += descriptors
            assert part, f"hung up after {data!r}"
            data += part
        return data


def frame(body: bytes, magic: bytes = b"wcp1", version: int = 1, zero: int = 0, length: int | None = None) -> bytes:
    return HEADER.pack(magic, version, zero, len(body) if length is None else length) + body


def packed(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def check_alive(place: registry.Place) -> None:
    with Peer(place) as other:
        assert other.ask({"type": "ping"})["state"] == "ready"


PING = packed({"type": "ping"})
DEEP = b"\x82\xa4type\xa4ping\xa1x" + b"\x91" * 100_000 + b"\xc0"


BAD_FRAMES = {
    "magic": (frame(PING, magic=b"wcp2"), "bad_frame"),
    "zero": (frame(PING, zero=1), "bad_frame"),
    "http": (b"GET / HTTP/1.1\r\n\r\n", "bad_frame"),
    "later version": (frame(PING, version=2), "bad_version"),
    "version 0": (frame(PING, version=0), "bad_version"),
    "a byte too large": (frame(b"", length=MAX_FRAME + 1), "frame_too_large"),
    "4 GiB": (frame(b"", length=(1 << 32) - 1), "frame_too_large"),
    "too large, sent": (frame(bytes(MAX_FRAME + 1)), "frame_too_large"),
    "empty": (frame(b""), "bad_message"),
    "no msgpack": (frame(b"\xc1"), "bad_message"),
    "two messages": (frame(PING + PING), "bad_message"),
    "cut message": (frame(PING[:-1]), "bad_message"),
    "no UTF-8": (frame(b"\x81\xa4type\xa4\xff\xff\xff\xff"), "bad_message"),
    "nested": (frame(DEEP), "bad_message"),
    "zeros": (frame(bytes(MAX_FRAME)), "bad_message"),
    "list": (frame(packed(["ping"])), "bad_message"),
    "no type": (frame(packed({})), "bad_message"),
    "a reply": (frame(packed({"type": "pong", "instance": "", "state": ""})), "bad_message"),
    "unknown type": (frame(packed({"type": "steal"})), "bad_message"),
    "type of type": (frame(packed({"type": 1})), "bad_message"),
    "no key": (frame(packed({"type": "attach"})), "bad_message"),
    "key of type": (frame(packed({"type": "attach", "key": 7})), "bad_message"),
    "null key": (frame(packed({"type": "attach", "key": None})), "bad_message"),
    "another key": (frame(packed({"type": "attach", "key": "wk1:" + "0" * 32})), "key_mismatch"),
    "long key": (frame(packed({"type": "attach", "key": "x" * (MAX_FRAME - 100)})), "key_mismatch"),
}


@pytest.mark.parametrize(("sent", "code"), BAD_FRAMES.values(), ids=BAD_FRAMES)
def test_bad_frame_gets_a_typed_error_and_a_closed_connection(daemon: registry.Place, sent: bytes, code: str) -> None:
    with Peer(daemon) as peer:
        peer.send(sent)
        answer = peer.hear()
        assert (answer["type"], answer["code"]) == ("error", code), answer
        assert len(answer["message"].splitlines()) == 1
        assert peer.is_closed()
    check_alive(daemon)


@pytest.mark.parametrize("cut", [1, 4, 11, 12, 13, 12 + len(PING) - 1])
def test_stream_that_ends_within_a_frame(daemon: registry.Place, cut: int) -> None:
    with Peer(daemon) as peer:
        peer.send(frame(PING)[:cut])
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.hear()["code"] == "bad_frame"
        assert peer.is_closed()
    check_alive(daemon)


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=60).map(frame),
        st.tuples(st.integers(0, 11 + len(PING)), st.integers(0, 255)).map(
            lambda change: bytes([*frame(PING)[: change[0]], change[1], *frame(PING)[change[0] + 1 :]])
        ),
        st.dictionaries(
            st.sampled_from(["type", "key", "x"]),
            st.none()
            | st.integers(-(1 << 63), (1 << 64) - 1)
            | st.floats()
            | st.sampled_from(["ping", "status", "attach"])
            | st.binary(),
        ).map(lambda message: frame(packed(message))),
    )
)
@example(b"")
def test_no_bytes_bring_a_daemon_down(daemon: registry.Place, data: bytes) -> None:
    """Whatever is sent: well-formed replies, then the end. Never silence with an open connection, never a crash."""
    with Peer(daemon) as peer:
        peer.send(data)
        with contextlib.suppress(OSError):
            peer.socket.shutdown(socket.SHUT_WR)
        kinds = []
        with contextlib.suppress(AssertionError, ConnectionError):
            while True:
                kinds.append(peer.hear()["type"])
    assert set(kinds) <= {"pong", "status_reply", "error"}
    assert "error" not in kinds[:-1]
    assert bool(kinds) == bool(data)
    check_alive(daemon)


def test_peers_that_stall_delay_nobody(daemon: registry.Place) -> None:
    """A silent one, one within a header, one within a body, and one that never reads; then others are served at once."""
    with contextlib.ExitStack() as stack:
        silent, in_header, in_body, deaf = (stack.enter_context(Peer(daemon)) for _ in range(4))
        in_header.send(frame(PING)[:5])
        in_body.send(frame(PING)[:-1])
        deaf.socket.setblocking(False)
        status = frame(packed({"type": "status"}))
        with contextlib.suppress(BlockingIOError):
            while True:
                deaf.socket.send(status * 100)
        deaf.socket.settimeout(60)
        for _ in range(3):
            check_alive(daemon)
        # They were not thrown out either: what they began is answered when they go on.
        in_header.send(frame(PING)[5:])
        in_body.send(frame(PING)[-1:])
        assert [peer.hear()["type"] for peer in (in_header, in_body)] == ["pong", "pong"]
        assert silent.ask({"type": "ping"})["type"] == "pong"
        assert deaf.hear()["type"] == "status_reply"


def test_many_requests_on_one_connection(daemon: registry.Place) -> None:
    """Frames may arrive together; each has its answer, in order. Fields of a later version are passed over."""
    with Peer(daemon) as peer:
        peer.send(frame(PING) + frame(packed({"type": "status", "later": 1})) + frame(PING))
        assert [peer.hear()["type"] for _ in range(3)] == ["pong", "status_reply", "pong"]


def status_of(place: registry.Place) -> dict[str, Any]:
    with Peer(place) as peer:
        return peer.ask({"type": "status"})


def await_leases(place: registry.Place, count: int) -> None:
    """Ask until the daemon has noticed; the limit of the test ends it where it never does."""
    while status_of(place)["leases"] != count:
        pass


def test_leases_are_the_connections_that_attached(daemon: registry.Place) -> None:
    attach = {"type": "attach", "key": status_of(daemon)["key"]}
    with Peer(daemon) as first, Peer(daemon) as second:
        assert status_of(daemon)["leases"] == 0
        assert first.ask(attach)["type"] == "attach_reply"
        assert second.ask(attach)["type"] == "attach_reply"
        assert status_of(daemon)["leases"] == 2
        # A lease may go on asking, and is given up by closing it alone.
        assert first.ask({"type": "status"})["leases"] == 2
        first.socket.close()
        await_leases(daemon, 1)
        again = second.ask(attach)
        assert (again["code"], second.is_closed()) == ("bad_message", True)
        await_leases(daemon, 0)
    with Peer(daemon) as garbled:
        garbled.ask(attach)
        garbled.send(b"\0" * HEADER.size)
        assert garbled.hear()["code"] == "bad_frame"
        await_leases(daemon, 0)


def test_documents_are_no_lease(daemon: registry.Place) -> None:
    with Peer(daemon) as peer:
        for request, reply in (("manifest", "manifest_reply"), ("checkpoint", "checkpoint_reply")):
            answer = peer.ask({"type": request})
            assert answer["type"] == reply
            assert os.fstat(peer.descriptors[-1]).st_size == answer["size"]
        assert len(peer.descriptors) == 2
        assert status_of(daemon)["leases"] == 0


def test_descriptors_are_sealed_by_the_kernel(daemon: registry.Place) -> None:
    """Slab and manifest can be read, and neither written, resized, mapped writable nor unsealed by anyone."""
    with Peer(daemon) as peer:
        answer = peer.ask({"type": "attach", "key": status_of(daemon)["key"]})
        sizes = [answer["slab_size"], answer["manifest_size"]]
        assert [os.fstat(descriptor).st_size for descriptor in peer.descriptors] == sizes
        for descriptor, size in zip(peer.descriptors, sizes, strict=True):
            reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            for handle in (descriptor, reopened):
                with pytest.raises(PermissionError):
                    mmap.mmap(handle, size)
                with pytest.raises(PermissionError):
                    os.pwrite(handle, b"\0", 0)
                for length in (size - 1, size + 1):
                    with pytest.raises(PermissionError):
                        os.ftruncate(handle, length)
                with pytest.raises(PermissionError):
                    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
            os.close(reopened)
            with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ) as view:
                assert len(view[:]) == size
                with pytest.raises(TypeError):
                    view[0] = 1


def open_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_descriptors_that_a_peer_sends_along_are_not_kept(daemon: registry.Place) -> None:
    pid = status_of(daemon)["pid"]
    with Peer(daemon) as peer:
        peer.ask({"type": "ping"})
        before = open_descriptors(pid)
        for body in (PING, PING, PING):
            socket.send_fds(peer.socket, [frame(body)], [0, 1, 2])
            assert peer.hear()["type"] == "pong"
        assert open_descriptors(pid) == before
        socket.send_fds(peer.socket, [frame(b"\xc1")], [0, 1, 2])
        assert peer.hear()["code"] == "bad_message"
        assert peer.is_closed()
    check_alive(daemon)


def test_daemon_that_ends_while_it_loads_tells_those_who_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="wcw-") as root, tiny.rank(tiny.write(tmp_path, tiny.DENSE)):
        monkeypatch.setenv("WEIGHT_CACHE_DIR", root)
        loading = DaemonRank(0, lambda done, total: None)
        loading.claim()
        with Peer(registry.place("cpu-0", loading.key)) as waiting, Peer(registry.place("cpu-0", loading.key)) as other:
            assert waiting.ask({"type": "status"})["state"] == "loading"
            waiting.say({"type": "attach", "key": loading.key})
            while not loading._waiters:
                other.ask({"type": "ping"})
            loading.close()
            waiting.socket.setblocking(False)
            assert waiting.hear()["code"] == "load_failed"
        assert not list(Path(root).glob("cpu-*"))


@pytest.mark.parametrize("tp_size", [1, 2])
def test_killed_supervisor_takes_its_ranks_with_it_and_nothing_stays(
    workshop: Workshop, tmp_path: Path, tp_size: int
) -> None:
    """A rank learns of it twice, by the end of its stream and by a signal; the second must not part its cleaning up."""
    before = workshop.left_over()
    for seed in range(3):
        tensors = tiny.make_tensors(tiny.DENSE, seed=seed)
        model = tiny.write(tmp_path / str(seed), tiny.DENSE, tensors)
        process = workshop.daemon(model, "--tp-size", str(tp_size), "--base-gpu-id", "1")
        places = [registry.Place(path) for path in workshop.registry.glob("cpu-[12]/*")]
        ranks = [status_of(place)["pid"] for place in places]
        assert len(ranks) == tp_size
        (supervisor,) = {psutil.Process(rank).ppid() for rank in ranks}
        ends = [os.pidfd_open(rank) for rank in ranks]
        os.kill(supervisor, signal.SIGKILL)
        for end in ends:
            select.select([end], [], [])
            os.close(end)
        assert workshop.left_over() == before
        process.stop()


def test_socket_and_directory_are_the_users_own(daemon: registry.Place) -> None:
    assert Path(daemon.path).stat().st_mode & 0o077 == 0
    assert daemon.path.parent.parent.stat().st_mode & 0o777 == 0o700
