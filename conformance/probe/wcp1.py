"""An independent client of the wire protocol `wcp1` (SPEC 5 and 6), to read a daemon's bytes as a third party.

Written from the specification alone: it shares no code with any implementation, so that a mistake must be made twice
to pass.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from conformance.targets.fault import TargetFault

MAGIC = b"wcp1"
VERSION = 1
HEADER = struct.Struct(">4sHHI")
MAX_FRAME = 1 << 20
MAX_DESCRIPTORS = 8
#: Seconds until a daemon that says nothing at all is given up. `attach` and `manifest` wait while it loads.
REPLY_SECONDS = 60.0
#: Bytes of one element, by the specification's names.
ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4}


class ProtocolError(TargetFault):
    """A daemon said something that the specification doesn't allow, or nothing; the text says what."""


class Refused(TargetFault):
    """A daemon answered with a typed error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The reply to `ping`."""

    instance: str
    state: str


class Status(msgspec.Struct, frozen=True, tag="status_reply"):
    """The reply to `status`; `leases` counts the connections that hold the weights."""

    instance: str
    pid: int
    state: str
    key: str | None
    layout_hash: str | None
    checkpoint: str | None
    post_processing: int
    epoch: int
    device: str
    transport: str
    leases: int
    loaded_bytes: int
    total_bytes: int
    arguments: dict[str, Any]


class ManifestReply(msgspec.Struct, frozen=True, tag="manifest_reply"):
    """The reply to `manifest`: bytes of the manifest whose descriptor came along."""

    size: int


class AttachReply(msgspec.Struct, frozen=True, tag="attach_reply"):
    """The reply to `attach`: bytes of the slab and the manifest, whose descriptors came along in this order."""

    key: str
    layout_hash: str
    epoch: int
    transport: str
    slab_size: int
    manifest_size: int


class ErrorReply(msgspec.Struct, frozen=True, tag="error"):
    """A typed refusal."""

    code: str
    message: str


class ManifestTensor(msgspec.Struct, frozen=True):
    """One tensor of a manifest: where its bytes lie in the slab (`offset`, `nbytes`) and what they should be."""

    name: str
    dtype: str
    shape: list[int]
    stride: list[int]
    offset: int
    nbytes: int
    kind: str
    alias: str | None
    transform: dict[str, Any]
    sources: list[dict[str, Any]]
    digests: list[str]


class Manifest(msgspec.Struct, frozen=True):
    """What a daemon says that a slab holds."""

    format: int
    key: str
    layout_hash: str
    checkpoint: str
    epoch: int
    slab_size: int
    experts: dict[str, list[int]]
    tensors: list[ManifestTensor]


@dataclass(frozen=True)
class FileIdentity:
    """What tells one piece of shared memory from any other on this host: device (major, minor) and inode."""

    major: int
    minor: int
    inode: int

    @classmethod
    def of(cls, descriptor: int) -> FileIdentity:
        found = os.fstat(descriptor)
        return cls(os.major(found.st_dev), os.minor(found.st_dev), found.st_ino)


@dataclass(frozen=True)
class Slab:
    """A mapped slab: its bytes, read-only, what the daemon says they are, and which memory it is."""

    reply: AttachReply
    manifest: Manifest
    data: npt.NDArray[np.uint8]
    identity: FileIdentity

    def tensor_bytes(self, tensor: ManifestTensor) -> npt.NDArray[np.uint8]:
        """Return a tensor's bytes. Raises `ProtocolError` where the manifest points outside the slab."""
        count = int(np.prod(tensor.shape, dtype=np.int64)) * ITEM_SIZES[tensor.dtype]
        if tensor.nbytes != count:
            raise ProtocolError(f"{tensor.name}: {tensor.nbytes} bytes, {tensor.shape} {tensor.dtype} needs {count}")
        if tensor.offset < 0 or tensor.offset + count > len(self.data):
            raise ProtocolError(f"{tensor.name}: [{tensor.offset}, {tensor.offset + count}) of {len(self.data)} bytes")
        return self.data[tensor.offset : tensor.offset + count]


Reply = TypeVar("Reply", bound=msgspec.Struct)


class Connection:
    """A connection to one daemon's socket. Use as a context manager; closing it gives up its lease."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(REPLY_SECONDS)
        try:
            self._socket.connect(str(path))
        except OSError as error:
            self._socket.close()
            raise ProtocolError(f"{path}: {error}") from error

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ping(self) -> Pong:
        return self._ask({"type": "ping"}, Pong, 0)[0]

    def status(self) -> Status:
        return self._ask({"type": "status"}, Status, 0)[0]

    def manifest(self) -> Manifest:
        """Return the manifest, without a lease."""
        reply, descriptors = self._ask({"type": "manifest"}, ManifestReply, 1)
        with _closing(descriptors):
            return _read_manifest(descriptors[0], reply.size)

    @contextmanager
    def attach(self, key: str) -> Iterator[Slab]:
        """Take a lease and map the slab for as long as the block runs. The lease lasts until the connection closes."""
        reply, descriptors = self._ask({"type": "attach", "key": key}, AttachReply, 2)
        with _closing(descriptors):
            manifest = _read_manifest(descriptors[1], reply.manifest_size)
            length = os.fstat(descriptors[0]).st_size
            if length < reply.slab_size:
                raise ProtocolError(f"attach_reply says a slab of {reply.slab_size} bytes, the descriptor has {length}")
            # Private, since Linux before 6.7 refuses a shared mapping of what is sealed against writing, even to read it.
            mapped = mmap.mmap(descriptors[0], reply.slab_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
            data = np.frombuffer(mapped, dtype=np.uint8)
            # The mapping ends with the last array over it, so that a view kept by mistake can't turn into a crash.
            yield Slab(reply, manifest, data, FileIdentity.of(descriptors[0]))

    def send_raw(self, data: bytes) -> None:
        """Send bytes as they are, to see what a daemon makes of them."""
        self._socket.sendall(data)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and the descriptors that came with it. Raises `ProtocolError`."""
        header, descriptors = self._receive(HEADER.size)
        try:
            magic, version, zero, length = HEADER.unpack(header)
            if (magic, version, zero) != (MAGIC, VERSION, 0):
                raise ProtocolError(f"{self.path}: not a {MAGIC.decode()} frame of version {VERSION}: {header.hex()}")
            if length > MAX_FRAME:
                raise ProtocolError(f"{self.path}: a frame of {length} bytes, at most {MAX_FRAME} are allowed")
            body, more = self._receive(length)
            descriptors += more
            message = msgspec.msgpack.decode(body)
            if not isinstance(message, dict):
                raise ProtocolError(f"{self.path}: a frame holds {type(message).__name__}, not a map")
        except (ProtocolError, msgspec.DecodeError) as error:
            _close(descriptors)
            raise ProtocolError(str(error)) from error
        return message, descriptors

    def _ask(self, request: dict[str, Any], schema: type[Reply], descriptors: int) -> tuple[Reply, list[int]]:
        self.send_raw(frame(request))
        message, received = self.receive()
        try:
            if message.get("type") == "error":
                refusal = msgspec.convert(message, ErrorReply)
                raise Refused(refusal.code, refusal.message)
            reply = msgspec.convert(message, schema)
            if len(received) != descriptors:
                raise ProtocolError(f"{request['type']}: {descriptors} descriptors expected, got {len(received)}")
        except msgspec.ValidationError as error:
            _close(received)
            raise ProtocolError(f"{request['type']}: {error}") from error
        except (Refused, ProtocolError):
            _close(received)
            raise
        return reply, received

    def _receive(self, length: int) -> tuple[bytes, list[int]]:
        data = bytearray()
        descriptors: list[int] = []
        size = array.array("i").itemsize
        while len(data) < length:
            try:
                space = socket.CMSG_SPACE(MAX_DESCRIPTORS * size)
                part, ancillary, _, _ = self._socket.recvmsg(length - len(data), space, socket.MSG_CMSG_CLOEXEC)
            except OSError as error:
                _close(descriptors)
                raise ProtocolError(f"{self.path}: {error}") from error
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    received = array.array("i")
                    received.frombytes(content[: len(content) - len(content) % size])
                    descriptors += received
            if not part:
                _close(descriptors)
                raise ProtocolError(f"{self.path}: closed after {len(data)} of {length} bytes")
            data += part
        return bytes(data), descriptors


def frame(message: Any) -> bytes:
    """Return one frame that holds a message."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(MAGIC, VERSION, 0, len(body)) + body


def _read_manifest(descriptor: int, size: int) -> Manifest:
    data = os.pread(descriptor, size, 0)
    if len(data) != size:
        raise ProtocolError(f"manifest: {size} bytes announced, {len(data)} there")
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"manifest: {error}") from error


@contextmanager
def _closing(descriptors: list[int]) -> Iterator[None]:
    try:
        yield
    finally:
        _close(descriptors)


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
