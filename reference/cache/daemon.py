"""One rank of the weight cache daemon: claim a place, fill and seal a slab, serve it until told to stop."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from reference.cache import manifest as manifests
from reference.cache import registry, wire
from reference.cache.key import derive_key
from reference.cache.memory_file import seal_bytes
from reference.cache.transport import shm
from reference.context import get_context, get_model
from reference.errors import CacheRefusal
from reference.models import build_model
from reference.parallel import device_name
from reference.weights.checkpoint import Checkpoint
from reference.weights.fill import fill_slab, slab_bytes
from reference.weights.fingerprint import TensorDigests, compute_digests, fingerprint
from reference.weights.plan import POST_PROCESSING, RankPlan, plan_rank

if TYPE_CHECKING:
    from reference.cache.transport.base import Slab

_REQUEST = 10.0  # seconds a connection may take for one whole request
_FAREWELL = 1.0  # seconds that a daemon which ends while it loads gives its clients to hear of it
_EXHAUSTED = 0.1  # seconds between attempts to accept while the process can have no more descriptors or threads
_TRANSPORT = "shm"


class DaemonRank:
    """What one rank holds and how far it is. It answers from the moment it has claimed its place.

    `claim`, `load`, `open`, `close`, in this order; `close` may come after any of them.
    """

    def __init__(self, rank: int, progress: Callable[[int, int], None]) -> None:
        """Plan this rank's tensors and derive its key. `progress` gets bytes digested and in all. Raises `Refusal`."""
        self.device = device_name()
        registry.check_socket_path(self.device)
        self._checkpoint = Checkpoint.open(get_model().model_path)
        self._plan: RankPlan = plan_rank(build_model(self._checkpoint, get_model().dtype), self._checkpoint)
        self._digests: dict[str, TensorDigests] = compute_digests(
            self._checkpoint, registry.digest_store(), rank, progress
        )
        self.checkpoint = fingerprint(self._digests)
        self.key = derive_key(self.checkpoint, self._plan.layout_hash)
        self.instance = secrets.token_hex(8)
        self._started = time.time()
        self._state = "loading"
        self._progress = (0, self._plan.slab_size)
        self._leases = 0
        self._waiters: set[threading.Thread] = set()
        self._changed = threading.Condition()
        self._slab: Slab | None = None
        self._documents: dict[type, tuple[int, int]] = {}
        self._claim: registry.Claim | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def claim(self) -> None:
        """Take this key's place in the registry and answer there. Raises `CacheRefusal` where a daemon has it."""
        self._claim = registry.Claim(self.device, self.key)
        self._write_status()
        self._listener.bind(str(self._claim.place.socket))
        self._listener.listen(128)
        threading.Thread(target=self._accept, name="accept", daemon=True).start()

    def load(self, progress: Callable[[int, int], None]) -> None:
        """Fill the slab from disk, digest it and seal it. `progress` gets bytes done and in all."""

        def note(done: int, total: int) -> None:
            self._progress = (done, total)
            progress(done, total)

        slab = shm.allocate(slab_bytes(self._plan))
        fill_slab(slab.writable(), self._plan, self._checkpoint, note)
        slab.seal()
        manifest = manifests.make_manifest(self._plan, slab.tensor(), self.key, self.checkpoint)
        self._slab = slab
        self._publish(wire.GetManifest, "weight-cache-manifest", manifests.encode(manifest))
        self._publish(wire.GetCheckpoint, "weight-cache-checkpoint", msgspec.msgpack.encode(self._digests))

    def open(self) -> None:
        """Grant leases from now on: every rank of the group has loaded."""
        with self._changed:
            self._state = "ready"
            self._changed.notify_all()
        self._write_status()

    def close(self) -> None:
        """Remove this daemon from the registry and tell those who wait for it that nothing will come."""
        with self._changed:
            self._state = "ended"
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits in accept; closing would not
        self._listener.close()
        if self._claim is not None:
            self._claim.release()
        for waiter in tuple(self._waiters):
            waiter.join(_FAREWELL)

    def _publish(self, request: type, name: str, data: bytes) -> None:
        self._documents[request] = (seal_bytes(name, data), len(data))

    def _write_status(self) -> None:
        assert self._claim is not None
        self._claim.write_status(
            registry.StatusFile(
                pid=os.getpid(),
                instance=self.instance,
                state=self._state,
                key=self.key,
                layout_hash=self._plan.layout_hash,
                device=self.device,
                model_path=str(self._checkpoint.path),
                started=self._started,
            )
        )

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True).start()
            except (OSError, RuntimeError):
                if self._state == "ended":
                    return
                time.sleep(_EXHAUSTED)

    def _serve(self, connection: socket.socket) -> None:
        leased = False
        with connection:
            try:
                if wire.peer_uid(connection) != registry.owner():
                    return
                while (request := wire.receive_request(connection, float("inf") if leased else _REQUEST)) is not None:
                    if leased and isinstance(request, wire.Attach):
                        raise wire.FrameError("bad_message", "this connection is a lease already; open another one")
                    connection.settimeout(_REQUEST)
                    leased |= self._answer(connection, request)
            except wire.FrameError as error:
                self._refuse(connection, error.code, str(error))
            except CacheRefusal as error:
                self._refuse(connection, error.code, str(error))
            except OSError:
                pass
            finally:
                if leased:
                    with self._changed:
                        self._leases -= 1

    def _answer(self, connection: socket.socket, request: wire.Request) -> bool:
        """Answer one request. Returns whether the connection became a lease by it."""
        match request:
            case wire.Ping():
                wire.send(connection, wire.Pong(self.instance, self._state))
            case wire.Status():
                wire.send(connection, self._status())
            case wire.GetManifest():
                descriptor, size = self._document(request)
                wire.send(connection, wire.ManifestReply(size), (descriptor,))
            case wire.GetCheckpoint():
                descriptor, size = self._document(request)
                wire.send(connection, wire.CheckpointReply(size), (descriptor,))
            case wire.Attach(key=key):
                self._grant(connection, key)
                return True
        return False

    def _grant(self, connection: socket.socket, key: str) -> None:
        if key != self.key:
            raise CacheRefusal("key_mismatch", f"asked for key {key[:64]!r}, this daemon holds {self.key}")
        manifest, size = self._document(wire.GetManifest())
        slab = self._slab
        assert slab is not None
        reply = wire.AttachReply(self.key, self._plan.layout_hash, 0, _TRANSPORT, slab.size, size)
        with self._changed:
            self._leases += 1
        try:
            wire.send(connection, reply, (slab.descriptor, manifest))
        except OSError:
            with self._changed:
                self._leases -= 1
            raise

    def _document(self, request: wire.Request) -> tuple[int, int]:
        with self._changed:
            self._waiters.add(threading.current_thread())
            self._changed.wait_for(lambda: self._state != "loading")
            if self._state != "ready":
                raise CacheRefusal("load_failed", "daemon ended before it had loaded")
            self._waiters.remove(threading.current_thread())
            return self._documents[type(request)]

    def _status(self) -> wire.StatusReply:
        done, total = self._progress
        return wire.StatusReply(
            instance=self.instance,
            pid=os.getpid(),
            state=self._state,
            key=self.key,
            layout_hash=self._plan.layout_hash,
            checkpoint=self.checkpoint,
            post_processing=POST_PROCESSING,
            epoch=0,
            device=self.device,
            transport=_TRANSPORT,
            leases=self._leases,
            loaded_bytes=done,
            total_bytes=total,
            arguments=get_context().snapshot(),
        )

    @staticmethod
    def _refuse(connection: socket.socket, code: str, message: str) -> None:
        with contextlib.suppress(OSError):
            wire.send(connection, wire.Error(code, message))
