"""The probe against a daemon of a few lines: it reads what is right, and refuses what the specification doesn't allow."""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from conformance.cache_case import announced, digests_of
from conformance.probe.memory import footprint, mappings, unowned_shared_memory
from conformance.probe.registry import leftovers, places
from conformance.probe.wcp1 import HEADER, MAX_FRAME, Connection, FileIdentity, ProtocolError, Refused, frame
from matrix.digest import digest

KEY = "wk1:" + "0" * 32
WEIGHT = np.arange(6, dtype=np.float32)
EXPERTS = np.arange(8, dtype=np.float32).reshape(2, 4)
STATUS = {
    "type": "status_reply",
    "instance": "one",
    "pid": os.getpid(),
    "state": "ready",
    "key": KEY,
    "layout_hash": "lh1:0",
    "checkpoint": "ck1:0",
    "post_processing": 1,
    "epoch": 0,
    "device": "cpu-0",
    "transport": "shm",
    "leases": 0,
    "loaded_bytes": 56,
    "total_bytes": 56,
    "arguments": {},
}


def tensor(name: str, values: np.ndarray, offset: int, digests: list[str], **other: Any) -> dict[str, Any]:
    fields = {"stride": [1], "kind": "parameter", "alias": None, "transform": {"op": "copy"}, "sources": []}
    size = {"name": name, "dtype": "float32", "shape": list(values.shape), "offset": offset, "nbytes": values.nbytes}
    return fields | size | {"digests": digests} | other


def manifest(**other: Any) -> bytes:
    tensors = [
        tensor("a", WEIGHT, 0, [digest(WEIGHT)]),
        tensor("b", WEIGHT, 0, [], alias="a"),
        tensor("c", EXPERTS, 24, [digest(row) for row in EXPERTS]),
    ]
    fields = {"format": 1, "key": KEY, "layout_hash": "lh1:0", "checkpoint": "ck1:0", "epoch": 0, "slab_size": 56}
    return msgspec.msgpack.encode(fields | {"experts": {"0": [0, 1]}, "tensors": tensors} | other)


def memory(data: bytes) -> int:
    descriptor = os.memfd_create("weight-cache-test")
    os.write(descriptor, data)
    return descriptor


@dataclass
class Miniature:
    """A daemon that answers each request with what it was told to."""

    registry: Path
    answer: Callable[[dict[str, Any]], tuple[bytes, list[int]]]
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.path = self.registry / "cpu-0" / KEY.replace(":", "-") / "socket"
        self.path.parent.mkdir(parents=True)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, contextlib.suppress(ConnectionError):  # the probe hangs up on what it can't read
                while data := connection.recv(65536):
                    if data == b"end":
                        return
                    self.asked.append(msgspec.msgpack.decode(data[HEADER.size :]))
                    reply, descriptors = self.answer(self.asked[-1])
                    if not reply:
                        break
                    # Cut in two, as a stream may be.
                    socket.send_fds(connection, [reply[:5]], descriptors)
                    connection.sendall(reply[5:])
                    for descriptor in descriptors:
                        os.close(descriptor)
                    if len(reply) < HEADER.size + HEADER.unpack(reply[: HEADER.size])[3]:
                        break

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX) as last:
            last.connect(str(self.path))
            last.sendall(b"end")
        self._thread.join()
        self._listener.close()


SLAB = WEIGHT.tobytes() + EXPERTS.tobytes()


def honest(request: dict[str, Any]) -> tuple[bytes, list[int]]:
    match request["type"]:
        case "ping":
            return frame({"type": "pong", "instance": "one", "state": "ready"}), []
        case "status":
            return frame(STATUS), []
        case "manifest":
            return frame({"type": "manifest_reply", "size": len(manifest())}), [memory(manifest())]
        case "attach" if request["key"] == KEY:
            return attach_reply(), [memory(SLAB), memory(manifest())]
    return frame({"type": "error", "code": "key_mismatch", "message": "another key"}), []


def attach_reply(**other: Any) -> bytes:
    sizes = {"slab_size": len(SLAB), "manifest_size": len(manifest())}
    fields = {"type": "attach_reply", "key": KEY, "layout_hash": "lh1:0", "epoch": 0, "transport": "shm"}
    return frame(fields | sizes | other)


@pytest.fixture
def start() -> Iterator[Callable[..., Miniature]]:
    started = []
    directory = Path(tempfile.mkdtemp(prefix="wcc-"))  # tmp_path is too long for a socket

    def start(answer: Callable[[dict[str, Any]], tuple[bytes, list[int]]] = honest) -> Miniature:
        started.append(Miniature(directory, answer))
        return started[-1]

    descriptors = len(os.listdir("/proc/self/fd"))
    yield start
    for daemon in started:
        daemon.close()
    shutil.rmtree(directory)
    assert len(os.listdir("/proc/self/fd")) == descriptors, "the probe leaks descriptors"


def test_probe_finds_and_reads_a_daemon(start: Callable[..., Miniature]) -> None:
    daemon = start()
    (place,) = places(daemon.registry)
    assert (place.device, place.key, place.socket) == ("cpu-0", KEY, daemon.path)
    with Connection(place.socket) as connection:
        assert connection.ping().state == "ready"
        assert connection.status().key == KEY
        assert announced(connection.manifest()) == {"a": [digest(WEIGHT)], "b": [], "c": [digest(e) for e in EXPERTS]}
        with connection.attach(KEY) as slab:
            assert digests_of(slab) == {"a": [digest(WEIGHT)], "c": [digest(row) for row in EXPERTS]}
            assert slab.tensor_bytes(slab.manifest.tensors[0]).tobytes() == WEIGHT.tobytes()
            with pytest.raises(ValueError, match="read-only"):
                slab.data[0] = 1
            mapped = [mapping for mapping in mappings(os.getpid()) if mapping.identity == slab.identity]
            assert [mapping.writable for mapping in mapped] == [False]
            assert mapped[0].size >= len(SLAB)
            del slab
    assert [request["type"] for request in daemon.asked] == ["ping", "status", "manifest", "attach"]


def test_refusal_keeps_its_code(start: Callable[..., Miniature]) -> None:
    with (
        Connection(start().path) as connection,
        pytest.raises(Refused, match="another key") as refused,
        connection.attach("wk1:other"),
    ):
        pytest.fail("attached")
    assert refused.value.code == "key_mismatch"


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (b"", "closed after 0 of 12"),
        (frame(STATUS)[:40], "closed after"),
        (b"x" + frame(STATUS)[1:], "not a wcp1 frame"),
        (HEADER.pack(b"wcp1", 2, 0, 1) + b"\x80", "not a wcp1 frame of version 1"),
        (HEADER.pack(b"wcp1", 1, 0, MAX_FRAME + 1), "at most 1048576"),
        (HEADER.pack(b"wcp1", 1, 0, 1) + b"\x90", "holds list"),
        (HEADER.pack(b"wcp1", 1, 0, 1) + b"\xc1", "MessagePack"),
        (frame({"type": "pong", "instance": "one", "state": "ready"}), "status: Invalid value 'pong'"),
        (frame(STATUS | {"leases": "many"}), r"Expected `int`, got `str` - at `\$.leases`"),
        (frame({name: value for name, value in STATUS.items() if name != "epoch"}), "missing required field `epoch`"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_reply_is_told(start: Callable[..., Miniature], reply: bytes, told: str) -> None:
    def answer(request: dict[str, Any]) -> tuple[bytes, list[int]]:
        return reply, []

    daemon = start(answer)
    with Connection(daemon.path) as connection, pytest.raises(ProtocolError, match=told):
        connection.status()


@pytest.mark.parametrize(
    ("change", "descriptors", "told"),
    [
        ({}, 1, "2 descriptors expected, got 1"),
        ({}, 0, "2 descriptors expected, got 0"),
        ({}, 3, "2 descriptors expected, got 3"),
        ({"slab_size": 57}, 2, "a slab of 57 bytes, the descriptor has 56"),
        ({"manifest_size": 10**6}, 2, "1000000 bytes announced"),
        ({"manifest_size": 10}, 2, "manifest: "),
    ],
)
def test_bad_attach_is_told(
    start: Callable[..., Miniature], change: dict[str, Any], descriptors: int, told: str
) -> None:
    contents = [SLAB, manifest(), b""][:descriptors]
    daemon = start(lambda request: (attach_reply(**change), [memory(content) for content in contents]))
    with Connection(daemon.path) as connection, pytest.raises(ProtocolError, match=told), connection.attach(KEY):
        pytest.fail("attached")


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        (tensor("a", WEIGHT, 40, [digest(WEIGHT)]), r"\[40, 64\) of 56 bytes"),
        (tensor("a", WEIGHT, 0, [digest(WEIGHT)], nbytes=12), r"12 bytes, \[6\] float32 needs 24"),
    ],
)
def test_manifest_that_points_nowhere_is_told(start: Callable[..., Miniature], bad: dict[str, Any], told: str) -> None:
    content = manifest(tensors=[bad])
    daemon = start(lambda request: (attach_reply(manifest_size=len(content)), [memory(SLAB), memory(content)]))
    with (
        Connection(daemon.path) as connection,
        connection.attach(KEY) as slab,
        pytest.raises(ProtocolError, match=told),
    ):
        digests_of(slab)


def test_nobody_there(tmp_path: Path) -> None:
    assert places(tmp_path / "absent") == []
    with pytest.raises(ProtocolError, match="No such file"):
        Connection(tmp_path / "socket")


def test_leftovers_are_what_daemons_leave(tmp_path: Path) -> None:
    place = tmp_path / "cpu-0" / KEY.replace(":", "-")
    place.mkdir(parents=True)
    (tmp_path / "digests").mkdir()
    (tmp_path / "digests" / "8-15-200").touch()
    (tmp_path / "cpu-1").mkdir()
    assert leftovers(tmp_path) == [f"cpu-0/{place.name}"]
    (place / "lock").touch()
    assert leftovers(tmp_path) == [f"cpu-0/{place.name}", f"cpu-0/{place.name}/lock"]


def test_footprint_counts_descriptors_and_memory() -> None:
    before = footprint(os.getpid())
    descriptor = memory(b"1")
    mapped = mmap.mmap(descriptor, 1)
    os.close(descriptor)
    kept = bytearray(os.urandom(8 << 20))
    after = footprint(os.getpid())
    mapped.close()
    # A mapping made by mmap.mmap keeps a descriptor of its own.
    assert (after.descriptors, after.memfd_mappings) == (before.descriptors + 1, before.memfd_mappings + 1)
    assert footprint(os.getpid()).descriptors == before.descriptors
    assert after.anonymous_bytes - before.anonymous_bytes >= len(kept) // 2


def test_identity_tells_memory_apart() -> None:
    one, two = memory(b"1"), memory(b"1")
    try:
        assert FileIdentity.of(one) == FileIdentity.of(os.dup(one)) != FileIdentity.of(two)
    finally:
        os.close(one)
        os.close(two)


def test_shared_memory_in_use_is_nobodys_leak() -> None:
    name = f"weight-cache-test-{os.getpid()}"
    path = Path("/dev/shm") / name
    try:
        with path.open("wb"):
            assert unowned_shared_memory({name}) == set()
        path.write_bytes(b"1")
        with path.open("r+b") as file:
            mapped = mmap.mmap(file.fileno(), 1)
        assert unowned_shared_memory({name}) == set()
        mapped.close()
        assert unowned_shared_memory({name}) == {name}
    finally:
        path.unlink()


def test_mappings_of_nobody() -> None:
    with pytest.raises(ProcessLookupError):
        mappings(2**22 + 1)
