"""One connection between two processes: frames over a socket, and who has been lent what memory.

Only pickled control tuples, descriptors of shared memory and file descriptors go over the socket. A block
that is sent is *lent*: the sender keeps it until the receiver's last view of it dies, and the receiver says
so with its next frame. So giving memory back costs no message of its own.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from rollstream.engine.memory import Lease, Memory, Segment
from rollstream.engine.wire import Parcel, parcel_of

_LENGTH = struct.Struct("<Q")
_CHUNK = 1 << 17
_MOST_FDS = 64
SHOW, FORGET = "show", "forget"


class Channel:
    """One end. `maps` holds the segments known to this process by key, and may be shared by channels."""

    def __init__(self, sock: socket.socket, maps: dict[str, Segment]):
        self.sock = sock
        self.maps = maps
        self.lent: dict[int, Memory] = {}
        """What the peer may still read."""
        self.returned: deque[int] = deque()
        """Loans of the peer that are no longer needed here, to be told with the next frame."""
        self._loans = count()
        self._shown: set[str] = set()
        self._unshown: list[Segment] = []
        self._fds: deque[int] = deque()
        self._input = bytearray()

    # Out ---------------------------------------------------------------------------------------

    def wrap(self, parcel: Parcel) -> tuple[Any, ...]:
        """A parcel as plain data; its memory is lent to the peer."""
        memory, described = parcel.memory, None
        if memory is not None:
            segment, loan = memory.segment, next(self._loans)
            self.lent[loan] = memory
            if segment.key not in self._shown:
                self._shown.add(segment.key)
                self._unshown.append(segment)
            described = (segment.key, memory.offset, memory.size, memory.layout, loan)
        return parcel.data, described, tuple(self.wrap(parcel_of(part)) for part in parcel.parts)

    def frame(self, kind: str, *fields: Any) -> tuple[bytes, list[int]]:
        """Bytes to send, and the file descriptors to send with them."""
        returned = [self.returned.popleft() for _ in range(len(self.returned))]
        body = pickle.dumps((kind, returned, fields), 5)
        data, fds = _LENGTH.pack(len(body)) + body, []
        while self._unshown:  # the peer has to know a segment before it can read from it
            segment = self._unshown.pop()
            shown = pickle.dumps((SHOW, (), (segment.key, segment.size)), 5)
            data = _LENGTH.pack(len(shown)) + shown + data
            fds.insert(0, segment.fd)
        return data, fds

    def forget(self, keys: Sequence[str]) -> tuple[bytes, list[int]] | None:
        """A frame that lets the peer forget segments, if it knows any of them."""
        known = [key for key in keys if key in self._shown]
        self._shown.difference_update(known)
        return self.frame(FORGET, known) if known else None

    # In ----------------------------------------------------------------------------------------

    def receive(self) -> bool:
        """Read what there is, once; false at the end of the connection."""
        data, ancillary, _, _ = self.sock.recvmsg(_CHUNK, socket.CMSG_SPACE(4 * _MOST_FDS))
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self._fds.extend(struct.unpack(f"{len(content) // 4}i", content[: len(content) // 4 * 4]))
        self._input += data
        return bool(data)

    def frames(self) -> list[tuple[str, tuple[Any, ...]]]:
        """The frames that have come in whole: kind and fields."""
        frames, position = [], 0
        while len(self._input) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._input, position)
            end = position + _LENGTH.size + length
            if len(self._input) < end:
                break
            with memoryview(self._input)[position + _LENGTH.size : end] as body:
                kind, returned, fields = pickle.loads(body)
            position = end
            for loan in returned:
                self.lent.pop(loan, None)
            if kind == SHOW:
                key, size = fields
                self.maps[key] = Segment(key, self._fds.popleft(), size)
                continue
            if kind == FORGET:
                for key in fields[0]:
                    self.maps.pop(key, None)
            frames.append((kind, fields))
        del self._input[:position]
        return frames

    def unwrap(self, wrapped: tuple[Any, ...]) -> Parcel:
        """A parcel from plain data; its memory is leased."""
        data, described, parts = wrapped
        memory = None
        if described is not None:
            key, offset, size, layout, loan = described
            memory = Lease(self.maps[key], offset, size, layout, loan, self.returned)
        return Parcel(data, memory, [self.unwrap(part) for part in parts])

    def close(self) -> None:
        """No more frames; what the peer was lent is free."""
        self.sock.close()
        self.lent.clear()
        while self._fds:
            os.close(self._fds.popleft())
