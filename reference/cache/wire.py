"""The wire protocol `wcp1`: framed msgpack messages over a Unix stream socket, descriptors beside them.

Frame: `wcp1`, version (2 bytes), zero (2 bytes), length (4 bytes), all big-endian, then one msgpack map checked against
a schema. Nothing is ever unpickled.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from typing import Any

import msgspec

from reference.errors import CacheRefusal

MAGIC = b"wcp1"
VERSION = 1
MAX_FRAME = 1 << 20
_HEADER = struct.Struct("!4sHHI")
_PEERCRED = struct.Struct("iII")


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Is anyone there?"""


class Status(msgspec.Struct, frozen=True, tag="status"):
    """What do you hold, for whom, and how far are you?"""


class GetManifest(msgspec.Struct, frozen=True, tag="manifest"):
    """Give me the manifest; no lease."""


class GetCheckpoint(msgspec.Struct, frozen=True, tag="checkpoint"):
    """Give me the digests of your checkpoint's tensors, whole and sampled; no lease."""


class Attach(msgspec.Struct, frozen=True, tag="attach"):
    """Give me slab and manifest; this connection is my lease."""

    key: str


Request = Ping | Status | GetManifest | GetCheckpoint | Attach


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """Answer to `Ping`. `instance` is drawn anew by every daemon process."""

    instance: str
    state: str


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    """Answer to `Status`. `arguments` is the published configuration."""

    instance: str
    pid: int
    state: str
    key: str
    layout_hash: str
    checkpoint: str
    post_processing: int
    epoch: int
    device: str
    transport: str
    leases: int
    loaded_bytes: int
    total_bytes: int
    arguments: dict[str, dict[str, Any]]


class ManifestReply(msgspec.Struct, frozen=True, tag="manifest_reply"):
    """Answer to `GetManifest`: `size` bytes in the descriptor that comes along."""

    size: int


class CheckpointReply(msgspec.Struct, frozen=True, tag="checkpoint_reply"):
    """Answer to `GetCheckpoint`: `size` bytes in the descriptor that comes along."""

    size: int


class AttachReply(msgspec.Struct, frozen=True, tag="attach_reply"):
    """Answer to `Attach`: slab and manifest come along as descriptors, in this order. Sizes in bytes."""

    key: str
    layout_hash: str
    epoch: int
    transport: str
    slab_size: int
    manifest_size: int


class Error(msgspec.Struct, frozen=True, tag="error"):
    """Why there is no answer; the connection is closed after it."""

    code: str
    message: str


Reply = Pong | StatusReply | ManifestReply | CheckpointReply | AttachReply | Error
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(Reply)


class FrameError(Exception):
    """A frame that can't be answered. `code` is the wire's error code."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def send(sock: socket.socket, message: Request | Reply, descriptors: tuple[int, ...] = ()) -> None:
    """Send one message, with descriptors beside its first byte."""
    body = msgspec.msgpack.encode(message)
    frame = _HEADER.pack(MAGIC, VERSION, 0, len(body)) + body
    sent = socket.send_fds(sock, [frame], list(descriptors)) if descriptors else 0
    sock.sendall(frame[sent:])


def receive_request(sock: socket.socket, timeout: float) -> Request | None:
    """Receive one whole request within `timeout` seconds (may be infinite), or None at the end.

    Raises `FrameError`, and `TimeoutError`.
    """
    frame = _receive(sock, time.monotonic() + timeout)
    if frame is None:
        return None
    request: Request = _decode(_requests, frame[0], frame[1])
    # No request brings descriptors; what a peer sends along is closed, not kept.
    close_all(frame[1])
    return request


def ask(sock: socket.socket, request: Request, timeout: float) -> tuple[Reply, list[int]]:
    """Send a request; return the reply and its descriptors, received within `timeout` seconds.

    Raises `CacheRefusal`: `timeout`, or `protocol` where the daemon hangs up or its frame can't be read.
    """
    try:
        send(sock, request)
        frame = _receive(sock, time.monotonic() + timeout)
        if frame is None:
            raise CacheRefusal("protocol", "daemon closed the connection without an answer; did it fail?")
        return _decode(_replies, frame[0], frame[1]), frame[1]
    except TimeoutError:
        raise CacheRefusal(
            "timeout", f"daemon gave no answer within {timeout:g} s; see --weight-cache-timeout"
        ) from None
    except FrameError as error:
        raise CacheRefusal("protocol", f"daemon's answer can't be read ({error}); is it another version?") from None
    except OSError as error:
        raise CacheRefusal("protocol", f"connection to the daemon broke ({error.strerror}); did it fail?") from None


def peer_uid(sock: socket.socket) -> int:
    """Return the user id of the process at the other end, from the kernel."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
    return int(_PEERCRED.unpack(credentials)[1])


def _decode(decoder: Any, body: bytes, descriptors: list[int]) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, RecursionError) as error:
        close_all(descriptors)
        raise FrameError("bad_message", f"message does not follow the schema: {error}") from None


def _receive(sock: socket.socket, deadline: float) -> tuple[bytes, list[int]] | None:
    descriptors: list[int] = []
    try:
        head = _exactly(sock, _HEADER.size, deadline, descriptors)
        if head is None:
            return None
        magic, version, zero, length = _HEADER.unpack(head)
        if magic != MAGIC or zero != 0:
            raise FrameError(
                "bad_frame", f"frame starts with {head[:8]!r}, expected {MAGIC!r}, a version and two zeros"
            )
        if version != VERSION:
            raise FrameError("bad_version", f"protocol version {version}, this side speaks {VERSION}")
        if length > MAX_FRAME:
            raise FrameError("frame_too_large", f"frame of {length} bytes, at most {MAX_FRAME} are allowed")
        body = _exactly(sock, length, deadline, descriptors) if length else b""
        if body is None:
            raise FrameError("bad_frame", f"stream ended before the frame's {length} bytes")
    except BaseException:
        close_all(descriptors)
        raise
    return body, descriptors


def _exactly(sock: socket.socket, count: int, deadline: float, descriptors: list[int]) -> bytes | None:
    data = b""
    while len(data) < count:
        # The whole message has one deadline, so that a peer that sends a byte a second holds nobody up.
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left if math.isfinite(left) else None)
        part, received, _, _ = socket.recv_fds(sock, count - len(data), 8, socket.MSG_CMSG_CLOEXEC)
        descriptors += received
        if not part:
            if data:
                raise FrameError("bad_frame", f"stream ended after {len(data)} of {count} bytes")
            return None
        data += part
    return data


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that came along with a message nobody wanted."""
    while descriptors:
        os.close(descriptors.pop())
