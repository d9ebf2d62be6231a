"""One connection between two processes: frames over a socket, and who has been lent what memory.

Only pickled control tuples and descriptions of shared memory go over the socket; a second one, seldom used,
carries the file descriptors of segments that the peer does not know yet. A block that is sent is *lent*: the
sender keeps it until the receiver's last view of it dies, and the receiver says so with its next frame. So
giving memory back costs no message of its own.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Any

from rollstream.engine.errors import EngineError
from rollstream.engine.memory import Lease, Memory, Segment
from rollstream.engine.wire import Parcel, parcel_of

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 17
SHOW, FORGET = "show", "forget"


class Channel:
    """One end. `maps` holds the segments known to this process by key, and may be shared by channels."""

    def __init__(
        self,
        sock: socket.socket,
        fds: socket.socket,
        maps: dict[str, Segment],
        gone: deque[str] | None = None,
    ):
        self.sock = sock
        self._fds = fds
        self._gone = gone
        """Told of segments of the peer that nobody reads any more."""
        self.maps = maps
        self.lent: dict[int, Memory] = {}
        """What the peer may still read."""
        self.returned: deque[int] = deque()
        """Loans of the peer that are no longer needed here, to be told with the next frame."""
        self._loans = count()
        self._shown: set[str] = set()
        self._unshown: list[Segment] = []
        self._chunk = memoryview(bytearray(_CHUNK))  # read into again and again: allocating costs more
        self._input: bytes | bytearray = b""
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)

    # Out ---------------------------------------------------------------------------------------

    def wrap(self, parcel: Parcel) -> tuple[Any, ...]:
        """A parcel as plain data; its memory is lent to the peer."""
        parts = tuple(self.wrap(parcel_of(part)) for part in parcel.parts)
        memory, described = parcel.memory, None
        if memory is not None:
            segment, loan = memory.segment, next(self._loans)
            self.lent[loan] = memory
            if segment.key not in self._shown:
                self._shown.add(segment.key)
                self._unshown.append(segment)
            described = (segment.key, memory.offset, memory.size, memory.layout, loan)
        return parcel.data, described, parts

    def frame(self, kind: str, *fields: Any) -> bytes:
        """Bytes to send."""
        returned = [self.returned.popleft() for _ in range(len(self.returned))] if self.returned else ()
        shown = b""
        for segment in self._unshown:  # the peer has to know a segment before it can read from it
            with suppress(OSError):  # it is gone, and this frame will not reach it either
                socket.send_fds(self._fds, [b"."], [segment.fd])
            shown += _framed((SHOW, (), (segment.key, segment.size)))  # in the order of the descriptors
        self._unshown.clear()
        return shown + _framed((kind, returned, fields))

    def forget(self, keys: Sequence[str]) -> bytes | None:
        """A frame that lets the peer forget segments, if it knows any of them."""
        known = [key for key in keys if key in self._shown]
        self._shown.difference_update(known)
        return self.frame(FORGET, known) if known else None

    # In ----------------------------------------------------------------------------------------

    def receive(self, timeout: float | None = None) -> bool:
        """Read what there is, once; false at the end of the connection. `TimeoutError` if nothing comes."""
        if timeout is not None and not self._readable.poll(timeout * 1000):
            raise TimeoutError  # the socket's own timeout would be one for those who write, too
        length = self.sock.recv_into(self._chunk)
        if self._input:
            self._input += self._chunk[:length]
        else:
            self._input = bytes(self._chunk[:length])
        return length > 0

    def frames(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The frames that have come in whole: kind and fields."""
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
            if kind == SHOW:
                key, size = fields
                self.maps[key] = self._received(key, size)
                continue
            if kind == FORGET:
                for key in fields[0]:
                    self.maps.pop(key, None)
            frames.append((kind, fields))
        if not position and isinstance(self._input, bytearray):
            return frames  # more of a large frame: it grows in place
        rest = data[position:]
        self._input = bytearray(rest) if len(rest) else b""  # a large frame comes in many pieces
        return frames

    def _received(self, key: str, size: int) -> Segment:
        try:
            _, [fd], _, _ = socket.recv_fds(self._fds, 1, 1)
            return Segment(key, fd, size, self._gone)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"no shared memory could be mapped: {error}; maybe no descriptor is left (see ulimit -n): "
                f"copy what is kept for long, or give rs.engine('processes', pool_bytes=...) more"
            ) from error

    def drop_input(self) -> None:
        """Forget what came and cannot be understood."""
        self._input = b""

    def unwrap(self, wrapped: tuple[Any, ...]) -> Parcel:
        """A parcel from plain data; its memory is leased."""
        data, described, parts = wrapped
        memory = None
        if described is not None:
            key, offset, size, layout, loan = described
            memory = Lease(self.maps[key], offset, size, layout, loan, self.returned)
        return Parcel(data, memory, [self.unwrap(part) for part in parts])

    def hang_up(self) -> None:
        """No more frames."""
        self.sock.close()
        self._fds.close()

    def close(self) -> None:
        """No more frames, and what the peer was lent is free."""
        self.hang_up()
        self.lent.clear()


def _framed(content: tuple[Any, ...]) -> bytes:
    body = pickle.dumps(content, 5)
    return _LENGTH.pack(len(body)) + body
