"""The engine's side of the cache: find the daemon that holds this rank's bytes, take a lease, map the slab.

Nothing is believed that was not derived here first: the plan, the fingerprint and so the key are this process's own.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import msgspec

from reference.args import changes_bytes, declarations
from reference.cache import manifest as manifests
from reference.cache import registry, wire
from reference.cache.key import derive_key
from reference.cache.manifest import Manifest
from reference.cache.memory_file import read_bytes
from reference.cache.transport import shm
from reference.cache.transport.base import Slab
from reference.context import get_cache, get_context
from reference.errors import CacheRefusal
from reference.weights.checkpoint import Checkpoint, dtype_name
from reference.weights.fill import slab_bytes
from reference.weights.fingerprint import TensorDigests, compute_digests, fingerprint, known_digests, sample
from reference.weights.plan import RankPlan

_ANSWER = 10.0  # seconds for an answer that a living daemon gives at once
_Samples = msgspec.msgpack.Decoder(dict[str, TensorDigests])


@dataclass(frozen=True)
class Attachment:
    """A mapped slab and the lease that keeps it. `lease` reads as ended when the daemon is gone."""

    slab: Slab
    manifest: Manifest
    lease: socket.socket
    key: str
    checkpoint: str
    checkpoint_verified: str
    transport: str
    daemon_pid: int


@dataclass(frozen=True)
class _Peer:
    place: registry.Place
    status: wire.StatusReply


def attach(plan: RankPlan, checkpoint: Checkpoint, device: str, first_shard: int) -> Attachment:
    """Map the slab of the daemon on `device` that holds exactly the planned bytes.

    Raises `CacheRefusal`: `no_daemon`, `key_mismatch` with what differs from the nearest daemon, or what went wrong.
    """
    peers = _living_daemons(device)
    if not peers:
        raise CacheRefusal(
            "no_daemon",
            f"no weight cache daemon is there for {device} in {registry.root()}; start `python -m reference.daemon` with"
            " the same arguments, or give --weight-cache-fallback disk",
        )
    verified = "identity"
    digests = known_digests(checkpoint, registry.digest_store())
    if digests is None:
        verified, digests = _digest_unknown_files(plan, checkpoint, peers, first_shard)
    content = fingerprint(digests)
    key = derive_key(content, plan.layout_hash)
    where = registry.place(device, key)
    lease = _connect(where)
    if lease is None:
        raise CacheRefusal("key_mismatch", _explain(plan, checkpoint, digests, peers))
    descriptors: list[int] = []
    try:
        status, descriptors = wire.ask(lease, wire.Status(), _ANSWER)
        wire.close_all(descriptors)
        reply, descriptors = wire.ask(lease, wire.Attach(key), get_cache().weight_cache_timeout)
        if isinstance(reply, wire.Error):
            raise CacheRefusal(reply.code, f"daemon at {where.socket} refused: {reply.message}")
        if (
            not isinstance(status, wire.StatusReply)
            or not isinstance(reply, wire.AttachReply)
            or len(descriptors) != 2
            or reply.key != key
            or reply.transport != "shm"
        ):
            raise CacheRefusal(
                "protocol",
                f"daemon at {where.socket} answered attach with {reply!r} and {len(descriptors)} descriptors",
            )
        manifest = manifests.decode(read_bytes(descriptors.pop(), reply.manifest_size))
        manifests.check_against_plan(manifest, plan, key, content)
        slab = shm.attach(descriptors[0], slab_bytes(plan))
    except BaseException:
        wire.close_all(descriptors)
        lease.close()
        raise
    lease.settimeout(None)
    return Attachment(slab, manifest, lease, key, content, verified, reply.transport, status.pid)


def wait_for_end(lease: socket.socket) -> None:
    """Return when the daemon at the other end of a lease is gone. The kernel says so at once."""
    try:
        while lease.recv(4096):
            pass
    except OSError:
        pass


def _connect(where: registry.Place) -> socket.socket | None:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(_ANSWER)
        sock.connect(str(where.socket))
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        return None
    except OSError as error:
        sock.close()
        raise CacheRefusal("protocol", f"{where.socket}: {error.strerror}; is it a daemon's socket?") from None
    if (uid := wire.peer_uid(sock)) != registry.owner():
        sock.close()
        raise CacheRefusal(
            "registry", f"{where.socket}: served by user {uid}, only user {registry.owner()}'s daemons are trusted"
        )
    return sock


def _ask(where: registry.Place, request: wire.Request, timeout: float) -> tuple[wire.Reply, list[int]] | None:
    sock = _connect(where)
    if sock is None:
        return None
    with sock:
        return wire.ask(sock, request, timeout)


def _living_daemons(device: str) -> list[_Peer]:
    peers = []
    for where in registry.places(device):
        try:
            answer = _ask(where, wire.Status(), _ANSWER)
        except CacheRefusal:
            continue
        if answer is None:
            continue
        wire.close_all(answer[1])
        if isinstance(answer[0], wire.StatusReply):
            peers.append(_Peer(where, answer[0]))
    return peers


def _document(peer: _Peer, request: wire.Request) -> bytes | None:
    answer = _ask(peer.place, request, get_cache().weight_cache_timeout)
    if answer is None:
        return None
    reply, descriptors = answer
    if isinstance(reply, wire.ManifestReply | wire.CheckpointReply) and len(descriptors) == 1:
        return read_bytes(descriptors[0], reply.size)
    wire.close_all(descriptors)
    return None


def _digest_unknown_files(
    plan: RankPlan, checkpoint: Checkpoint, peers: list[_Peer], first_shard: int
) -> tuple[str, dict[str, TensorDigests]]:
    """Compare samples before whole files: a checkpoint that no daemon holds is refused without reading it."""
    differing = None
    for peer in peers:
        if peer.status.layout_hash != plan.layout_hash:
            continue
        data = _document(peer, wire.GetCheckpoint())
        if data is None:
            continue
        theirs = _decode_digests(data)
        differing = _first_different_sample(theirs, checkpoint)
        if differing is None:
            if get_cache().checkpoint_verify == "sampled":
                return "sampled", theirs
            return "full", compute_digests(checkpoint, registry.digest_store(), first_shard, lambda done, total: None)
    if differing is not None:
        raise CacheRefusal(
            "key_mismatch",
            f"{checkpoint.path}: tensor {differing} differs in content from what the daemon of this layout loaded; start"
            " a daemon for this checkpoint",
        )
    # No daemon has this layout, so no bytes are needed to say that there is no match.
    raise CacheRefusal("key_mismatch", _explain(plan, checkpoint, None, peers))


def _decode_digests(data: bytes) -> dict[str, TensorDigests]:
    try:
        return _Samples.decode(data)
    except msgspec.MsgspecError as error:
        raise CacheRefusal("protocol", f"daemon's digests can't be read ({error}); is it another version?") from None


def _first_different_sample(theirs: dict[str, TensorDigests], checkpoint: Checkpoint) -> str | None:
    for name in sorted(theirs.keys() | checkpoint.shard_of.keys()):
        if name not in theirs or name not in checkpoint.shard_of:
            return name
        entry = checkpoint.entry(name)
        if (theirs[name].dtype, theirs[name].shape) != (dtype_name(entry.dtype), entry.shape):
            return name
        if sample(checkpoint.view(name)) != theirs[name].sample:
            return name
    return None


def _explain(
    plan: RankPlan, checkpoint: Checkpoint, digests: dict[str, TensorDigests] | None, peers: list[_Peer]
) -> str:
    """Say what differs from the nearest daemon: arguments first, then tensors, then content."""
    ours = get_context().snapshot()
    nearest = min(peers, key=lambda p: (p.status.layout_hash != plan.layout_hash, len(_different_arguments(p, ours))))
    parts = _different_arguments(nearest, ours)
    # The refusal stands without the details: those that can't be had, or would have to be waited for, are left out.
    if nearest.status.state == "ready":
        with contextlib.suppress(CacheRefusal):
            parts += _different_bytes(nearest, plan, checkpoint, digests)
    return (
        f"daemon on {nearest.status.device} (pid {nearest.status.pid}) does not hold this rank's bytes; it differs in: "
        f"{'; '.join(parts) or 'post-processing version'}; start a daemon with the engine's arguments"
    )


def _different_bytes(
    peer: _Peer, plan: RankPlan, checkpoint: Checkpoint, digests: dict[str, TensorDigests] | None
) -> list[str]:
    if peer.status.layout_hash != plan.layout_hash:
        data = _document(peer, wire.GetManifest())
        difference = manifests.first_difference(manifests.decode(data), plan) if data else None
        return [difference] if difference else []
    if digests is not None and peer.status.checkpoint != fingerprint(digests):
        data = _document(peer, wire.GetCheckpoint())
        theirs = _decode_digests(data) if data else {}
        names = (name for name in sorted(theirs.keys() | digests.keys()) if theirs.get(name) != digests.get(name))
        return [f"content of checkpoint tensor {next(names, '(unknown)')} in {checkpoint.path}"]
    return []


def _different_arguments(peer: _Peer, ours: dict[str, dict[str, Any]]) -> list[str]:
    known = declarations()
    found = []
    for name in changes_bytes():
        namespace = known[name].namespace
        theirs = peer.status.arguments.get(namespace, {}).get(name)
        if theirs != ours[namespace][name]:
            found.append(f"{known[name].flags[0]} ({theirs} in the daemon, {ours[namespace][name]} in the engine)")
    return found
