"""An engine's rank that meets a daemon which lies: it believes nothing that it did not derive, and keeps nothing of it."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from conformance.selftest import tiny
from reference.cache import client, manifest, registry, wire
from reference.cache.acquire import acquire_weights
from reference.cache.client import attach
from reference.cache.key import derive_key
from reference.cache.memory_file import seal_bytes
from reference.context import get_context
from reference.errors import CacheRefusal
from reference.models import build_model
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import bind, fill_slab, slab_bytes
from reference.weights.fingerprint import compute_digests, fingerprint
from reference.weights.plan import RankPlan


def unsealed(data: bytes) -> int:
    descriptor = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(descriptor, data)
    return descriptor


@dataclass
class Impostor:
    """A daemon in a thread, honest by default; a test replaces what it says or gives."""

    plan: RankPlan
    key: str
    fingerprint: str
    slab: bytes
    manifest: dict[str, Any]
    reply: dict[str, Any] = field(default_factory=dict)
    descriptors: list[int] | None = None
    answer: wire.Reply | bytes | None = None
    busy: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            # A client that refuses hangs up in the middle.
            with self.busy, connection, contextlib.suppress(OSError):
                while (request := wire.receive_request(connection, 60)) is not None:
                    if not self.respond(connection, request):
                        break

    def respond(self, connection: socket.socket, request: wire.Request) -> bool:
        if isinstance(request, wire.Status):
            status = [
                "a",
                os.getpid(),
                "ready",
                self.key,
                self.plan.layout_hash,
                self.fingerprint,
                1,
                0,
                "cpu-0",
                "shm",
            ]
            wire.send(connection, wire.StatusReply(*status, 0, 1, 1, get_context().snapshot()))  # type: ignore[arg-type]
            return True
        if isinstance(self.answer, bytes):
            connection.sendall(self.answer)
            return bool(self.answer)
        document = msgspec.msgpack.encode(self.manifest)
        honest = {
            "key": self.key,
            "layout_hash": self.plan.layout_hash,
            "epoch": 0,
            "transport": "shm",
            "slab_size": len(self.slab),
            "manifest_size": len(document),
        }
        given = [seal_bytes("slab", self.slab), seal_bytes("manifest", document)]
        if self.descriptors is not None:
            wire.close_all(given)
            given = self.descriptors
        try:
            wire.send(connection, self.answer or wire.AttachReply(**(honest | self.reply)), tuple(given))
        finally:
            wire.close_all(given)
        return True


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("model"), tiny.SPARSE | {"tie_word_embeddings": True})


@pytest.fixture
def impostor(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Impostor]:
    arguments = {"weight_cache_mode": "client", "weight_cache_timeout": 60.0}
    with tempfile.TemporaryDirectory(prefix="wci-") as root, tiny.rank(directory, **arguments):
        monkeypatch.setenv("WEIGHT_CACHE_DIR", root)
        plan, checkpoint = tiny.plan(directory), Checkpoint.open(directory)
        slab = torch.zeros(slab_bytes(plan), dtype=torch.uint8)
        fill_slab(slab, plan, checkpoint, lambda done, total: None)
        content = fingerprint(compute_digests(checkpoint, registry.digest_store(), 0, lambda done, total: None))
        key = derive_key(content, plan.layout_hash)
        true = msgspec.to_builtins(manifest.make_manifest(plan, slab, key, content))
        impostor = Impostor(plan, key, content, slab.numpy().tobytes(), true)
        place = registry.place("cpu-0", key)
        place.path.mkdir(parents=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(place.socket))
            listener.listen()
            thread = threading.Thread(target=impostor.serve, args=(listener,))
            thread.start()
            yield impostor
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def open_files() -> Counter[str]:
    """Count what this process has open, the listing itself aside."""
    found: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            found[os.readlink(f"/proc/self/fd/{name}")] += 1
    return found


def refused(impostor: Impostor, directory: Path) -> str:
    """Attach, which must be refused as `protocol`, in one line, with every descriptor given back."""
    before = open_files()
    with pytest.raises(CacheRefusal) as caught:
        attach(impostor.plan, Checkpoint.open(directory), "cpu-0", 0)
    assert caught.value.code == "protocol", caught.value
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    with impostor.busy:  # its thread has noticed the end of the connection, and holds nothing of its own
        assert not open_files() - before
    return message


def test_an_honest_daemon_is_attached(impostor: Impostor, directory: Path) -> None:
    """The fixture itself says nothing wrong, so that each refusal below is of its own lie."""
    checkpoint = Checkpoint.open(directory)
    weights = acquire_weights(impostor.plan, checkpoint, "cpu-0", 0)
    assert (weights.source, weights.digest_state, weights.checkpoint_verified) == ("cache", "verified", "identity")
    assert (weights.key, weights.daemon_pid) == (impostor.key, os.getpid())
    model = build_model(checkpoint, "auto")
    bind(model, impostor.plan, weights.slab.tensor())
    assert torch.equal(model.model.norm.weight, checkpoint.view("model.norm.weight"))
    assert weights.lease is not None
    weights.lease.close()
    weights.slab.close()


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def edit(document: dict[str, Any]) -> None:
        *way, last = path.split(".")
        for step in way:
            document = document[int(step) if isinstance(document, list) else step]
        document[last] = value

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change("key", "wk1:" + "0" * 32), ["key wk1:0000"]),
        (change("layout_hash", "lh1:" + "0" * 32), ["layout hash lh1:0000"]),
        (change("checkpoint", "ck1:" + "0" * 32), ["checkpoint ck1:0000"]),
        (change("format", 2), ["format 2"]),
        (change("slab_size", 1), ["slab of 1 bytes"]),
        (change("experts.1", [0, 1, 2, 3, 5, 4]), ["layer 1 slot 4 holds logical expert 5 in the daemon, 4"]),
        (change("experts.1", [0]), ["layer 1 has 1 expert slots in the daemon, 6"]),
        (change("experts", {"x": []} | {"1": [0, 1, 2, 3, 4, 5], "2": [5]}), ["layer 2 has 1 expert slots"]),
        (change("tensors.0.offset", 256), ["lm_head.weight", "lies elsewhere"]),
        (change("tensors.0.nbytes", 2), ["lm_head.weight", "lies elsewhere"]),
        (change("tensors.0.shape", [8, 16]), ["lm_head.weight", "shape is [8, 16] in the daemon"]),
        (change("tensors.0.dtype", "float16"), ["lm_head.weight", "dtype is float16 in the daemon"]),
        (change("tensors.0.alias", None), ["lm_head.weight", "alias is None in the daemon"]),
        (change("tensors.1.name", "extra"), ["tensor extra is only on the daemon's side"]),
        (change("tensors", []), ["only on the engine's side"]),
        (change("tensors.0.offset", "0"), ["can't be read"]),
        (change("tensors", None), ["can't be read"]),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_manifest_that_lies(
    impostor: Impostor, directory: Path, edit: Callable[[dict[str, Any]], None], words: list[str]
) -> None:
    edit(impostor.manifest)
    message = refused(impostor, directory)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("reply", "word"),
    [
        ({"key": "wk1:" + "0" * 32}, "answered attach with"),
        ({"transport": "cuda_vmm"}, "answered attach with"),
        ({"manifest_size": 10}, "document has"),
        ({"manifest_size": 1 << 60}, "document has"),
        ({"manifest_size": -1}, "document has"),
    ],
    ids=["key", "transport", "short manifest", "endless manifest", "negative manifest"],
)
def test_reply_that_lies(impostor: Impostor, directory: Path, reply: dict[str, Any], word: str) -> None:
    impostor.reply = reply
    assert word in refused(impostor, directory)


def test_slab_that_could_change_or_is_none(impostor: Impostor, directory: Path, tmp_path: Path) -> None:
    """An unsealed memfd, a file, a pipe, a slab of another size, one descriptor too few: nothing of it is mapped."""
    document = msgspec.msgpack.encode(impostor.manifest)
    (tmp_path / "file").write_bytes(impostor.slab)
    sealed = seal_bytes("manifest", document)
    pipe = os.pipe()
    os.close(pipe[1])
    for slab, word in (
        (unsealed(impostor.slab), "seals 0x0"),
        (os.open(tmp_path / "file", os.O_RDONLY), "slab is not a memfd"),
        (pipe[0], "slab is not a memfd"),
        (seal_bytes("slab", impostor.slab[:-1]), f"slab has {len(impostor.slab) - 1} bytes"),
        (seal_bytes("slab", impostor.slab + b"\0"), f"slab has {len(impostor.slab) + 1} bytes"),
    ):
        impostor.descriptors = [slab, os.dup(sealed)]
        assert word in refused(impostor, directory)
    impostor.descriptors = [seal_bytes("slab", impostor.slab), unsealed(document)]
    assert "document has" in refused(impostor, directory)
    impostor.descriptors = [sealed]
    assert "and 1 descriptors" in refused(impostor, directory)


@pytest.mark.parametrize(
    ("answer", "word"),
    [
        (wire.Pong("a", "ready"), "answered attach with Pong"),
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 200 OK\r\n", "can't be read"),
        (b"wcp1\0\2\0\0\0\0\0\0", "version 2"),
        (b"wcp1\0\1\0\0\0\0\0\1\xc1", "does not follow the schema"),
        (b"wcp1\0\1\0\0\xff\xff\xff\xff", "4294967295 bytes"),
    ],
    ids=["pong", "end", "http", "version", "garbage", "too large"],
)
def test_answer_that_is_none(impostor: Impostor, directory: Path, answer: wire.Reply | bytes, word: str) -> None:
    impostor.answer = answer
    if isinstance(answer, wire.Pong):
        impostor.descriptors = []
    assert word in refused(impostor, directory)


def test_typed_error_keeps_its_code(impostor: Impostor, directory: Path) -> None:
    impostor.answer, impostor.descriptors = wire.Error("load_failed", "disk on fire"), []
    with pytest.raises(CacheRefusal, match="disk on fire") as caught:
        attach(impostor.plan, Checkpoint.open(directory), "cpu-0", 0)
    assert caught.value.code == "load_failed"


def test_bytes_that_are_not_what_was_digested(impostor: Impostor, directory: Path) -> None:
    """The last line of defence: structure, key and seals in order, one bit of one expert's slot is not."""
    tensor = next(t for t in impostor.plan.tensors if t.name.endswith("layers.2.mlp.experts.w2_weight"))
    at = tensor.offset + 3 * tensor.nbytes // 6
    impostor.slab = impostor.slab[:at] + bytes([impostor.slab[at] ^ 1]) + impostor.slab[at + 1 :]
    before = open_files()
    with pytest.raises(CacheRefusal, match=r"model\.layers\.2\.mlp\.experts\.w2_weight slot 3") as caught:
        acquire_weights(impostor.plan, Checkpoint.open(directory), "cpu-0", 0)
    assert caught.value.code == "digest_mismatch"
    del caught  # its traceback holds the mapping
    with impostor.busy:
        assert not open_files() - before


def test_another_users_daemon_is_not_trusted(
    impostor: Impostor, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uid = os.getuid()
    monkeypatch.setattr(wire, "peer_uid", lambda sock: uid + 1)
    with pytest.raises(CacheRefusal) as caught:
        client._connect(registry.place("cpu-0", impostor.key))
    assert caught.value.code == "registry"
    assert f"served by user {uid + 1}" in str(caught.value)


def test_dead_daemons_socket_is_no_daemon(impostor: Impostor, directory: Path) -> None:
    place = registry.place("cpu-1", impostor.key)
    place.path.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(place.socket))
    with pytest.raises(CacheRefusal) as caught:
        attach(impostor.plan, Checkpoint.open(directory), "cpu-1", 0)
    assert caught.value.code == "no_daemon"
