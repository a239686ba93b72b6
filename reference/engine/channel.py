"""Message channels between the HTTP process and rank 0: one stream socket, one frame a message.

A frame is 4 bytes of length (big-endian) and one msgpack message, checked against the receiver's type. Both ends are
this program: a frame that does not decode is a bug, and raises. A peer that goes away, even within a frame, is the end
of file.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Any, Generic, TypeVar

import msgspec

Received = TypeVar("Received")

_LENGTH = struct.Struct(">I")
_READ_SIZE = 1 << 16


def encode_frame(message: msgspec.Struct) -> bytes:
    """Return the frame of a message. Raises `OverflowError` for one of 4 GiB and more."""
    body = msgspec.msgpack.encode(message)
    if len(body) > 0xFFFFFFFF:
        raise OverflowError(f"message of {len(body)} bytes, at most {0xFFFFFFFF} fit a frame")
    return _LENGTH.pack(len(body)) + body


class Channel(Generic[Received]):
    """The blocking side. `closed` turns true when the peer is gone, and stays so."""

    def __init__(self, sock: socket.socket, decode_type: Any) -> None:
        sock.setblocking(True)
        self.closed = False
        self._sock = sock
        self._decoder = msgspec.msgpack.Decoder(decode_type)
        self._buffer = bytearray()
        self._pending: deque[Received] = deque()

    def fileno(self) -> int:
        """Return the socket's descriptor, to wait for several channels at once."""
        return self._sock.fileno()

    def send(self, message: msgspec.Struct) -> None:
        """Send one message, waiting for room. To a peer that is gone it is dropped, and `closed` turns true."""
        if self.closed:
            return
        try:
            self._sock.sendall(encode_frame(message))
        except ConnectionError:
            self.closed = True

    def receive(self) -> Received | None:
        """Return the next message, waiting for it; None when the peer is gone and nothing is left."""
        while not self._pending and not self.closed:
            self._read(0)
        return self._pending.popleft() if self._pending else None

    def receive_ready(self) -> list[Received]:
        """Return the messages that are already there, without waiting."""
        while not self.closed and self._read(socket.MSG_DONTWAIT):
            pass
        ready = list(self._pending)
        self._pending.clear()
        return ready

    def close(self) -> None:
        """Close the socket; the peer reads the end of file."""
        self.closed = True
        self._sock.close()

    def _read(self, flags: int) -> bool:
        try:
            data = self._sock.recv(_READ_SIZE, flags)
        except BlockingIOError:
            return False
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return False
        self._buffer += data
        self._parse()
        return True

    def _parse(self) -> None:
        while len(self._buffer) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                return
            self._pending.append(self._decoder.decode(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]


class AsyncChannel(Generic[Received]):
    """The asyncio side, made by `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decode_type: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = msgspec.msgpack.Decoder(decode_type)

    @classmethod
    async def open(cls, sock: socket.socket, decode_type: Any) -> AsyncChannel[Received]:
        """Take over a connected stream socket in the running loop."""
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, decode_type)

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message. It never waits, so it can be called while a task is being cancelled."""
        self._writer.write(encode_frame(message))

    async def receive(self) -> Received | None:
        """Return the next message; None when the peer is gone."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            body = await self._reader.readexactly(length)
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        received: Received = self._decoder.decode(body)
        return received

    async def close(self) -> None:
        """Send what is queued, then close the socket."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except ConnectionError:
            return
