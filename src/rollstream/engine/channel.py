"""One end of a connection between two processes: frames of bytes, and who has been lent what memory.

Only pickled control tuples and descriptions of shared memory are in the frames; a port beside them passes the
file descriptors of segments that the peer does not know yet. A block that is sent is *lent*: the sender keeps
it until the receiver's last view of it dies, and the receiver says so with its next frame. So giving memory
back costs no message of its own.

A channel does no input or output itself: it makes bytes, and is fed bytes.
"""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any, Protocol

from rollstream.engine.errors import EngineError
from rollstream.engine.memory import Lease, Memory, Segment
from rollstream.engine.serialization import Payload, payload_of

_LENGTH = struct.Struct("<Q")
_SHOW, FORGET = "show", "forget"


class DescriptorPort(Protocol):
    """Passes file descriptors to the peer."""

    def send(self, fd: int) -> None:
        """Pass one on."""
        ...

    def receive(self) -> int:
        """Take the next one."""
        ...

    def close(self) -> None:
        """No more."""
        ...


class SocketPort:
    """Passes file descriptors over a Unix socket."""

    def __init__(self, sock: socket.socket):
        self._sock = sock
        self.close = sock.close

    def send(self, fd: int) -> None:
        """Pass one on; if the peer is gone, the frame that needs it will not arrive either."""
        with suppress(OSError):
            socket.send_fds(self._sock, [b"."], [fd])

    def receive(self) -> int:
        """Take the next one."""
        _, [fd], _, _ = socket.recv_fds(self._sock, 1, 1)
        return fd


class Channel:
    """One end of a connection.

    Args:
        port: passes file descriptors.
        maps: the segments known to this process by key; channels may share them.
        gone: receives the keys of the peer's segments that nobody reads any more.
    """

    def __init__(self, port: DescriptorPort, maps: dict[str, Segment], gone: deque[str] | None = None):
        self._port = port
        self._gone = gone
        self._maps = maps
        self.lent: dict[int, Memory] = {}
        """What the peer may still read."""
        self._returned: deque[int] = deque()
        """Loans of the peer that ended here, to be said with the next frame."""
        self._loans = count()
        self._shown: set[str] = set()
        self._unshown: list[Segment] = []
        self._input: bytes | bytearray = b""

    # Out ---------------------------------------------------------------------------------------

    def wrap(self, payload: Payload) -> tuple[Any, ...]:
        """A payload as plain data; its memory is lent to the peer."""
        parts = tuple(self.wrap(payload_of(part)) for part in payload.parts)
        memory, described = payload.memory, None
        if memory is not None:
            segment, loan = memory.segment, next(self._loans)
            self.lent[loan] = memory
            if segment.key not in self._shown:
                self._shown.add(segment.key)
                self._unshown.append(segment)
            described = (segment.key, memory.offset, memory.size, memory.layout, loan)
        return payload.data, described, parts

    def frame(self, kind: str, *fields: Any) -> bytes:
        """Bytes to send."""
        returned = [self._returned.popleft() for _ in range(len(self._returned))] if self._returned else ()
        shown = b""
        for segment in self._unshown:  # the peer has to know a segment before it can read from it
            self._port.send(segment.fd)
            shown += _framed((_SHOW, (), (segment.key, segment.size)))  # in the order of the descriptors
        self._unshown.clear()
        return shown + _framed((kind, returned, fields))

    def forget(self, keys: Sequence[str]) -> bytes | None:
        """A frame that lets the peer forget segments, if it knows any of them."""
        known = [key for key in keys if key in self._shown]
        self._shown.difference_update(known)
        return self.frame(FORGET, known) if known else None

    # In ----------------------------------------------------------------------------------------

    def feed(self, received: bytes | memoryview) -> list[tuple[str, tuple[Any, ...]]]:
        """Take bytes that came in; return the frames that are complete now: kind and fields."""
        if self._input:
            self._input += received
        else:
            self._input = bytes(received)
        frames, data, position = [], memoryview(self._input), 0
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            end = position + _LENGTH.size + length
            if len(data) < end:
                break
            kind, returned, fields = pickle.loads(data[position + _LENGTH.size : end])
            position = end
            for loan in returned:
                self.lent.pop(loan, None)
            if kind == _SHOW:
                key, size = fields
                self._maps[key] = self._receive_segment(key, size)
                continue
            if kind == FORGET:
                for key in fields[0]:
                    self._maps.pop(key, None)
            frames.append((kind, fields))
        if not position and isinstance(self._input, bytearray):
            return frames  # more of a large frame: it grows in place
        rest = data[position:]
        self._input = bytearray(rest) if len(rest) else b""  # a large frame comes in many pieces
        return frames

    def _receive_segment(self, key: str, size: int) -> Segment:
        try:
            return Segment(key, self._port.receive(), size, self._gone)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no shared memory could be mapped: {error}; file descriptors may have run out (ulimit -n): "
                f"copy what is kept for long, or give rs.engine('processes', pool_bytes=...) more"
            ) from error

    def unwrap(self, wrapped: tuple[Any, ...]) -> Payload:
        """A payload from plain data; its memory is leased."""
        data, described, parts = wrapped
        memory = None
        if described is not None:
            key, offset, size, layout, loan = described
            memory = Lease(self._maps[key], offset, size, layout, loan, self._returned)
        return Payload(data, memory, [self.unwrap(part) for part in parts])

    def close(self) -> None:
        """No more frames, and what the peer was lent is free."""
        self._port.close()
        self._input = b""
        self.lent.clear()


def _framed(content: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(content, 5)
    return _LENGTH.pack(len(body)) + body
