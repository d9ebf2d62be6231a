"""Shared memory: arenas that a process writes into once, and leases by which others read in place.

A block is given back when the last reference to it dies, never by index: libraries keep aliases of arrays
(JAX does not copy what is aligned), so only the interpreter's own reference counts can tell.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

ALIGNMENT = 64
"""Where arrays begin, so that JAX and vector instructions can use them in place."""

Layout: TypeAlias = tuple[tuple[int, int], ...]
"""Where each buffer is in a block: offset and size."""


class Segment:
    """One piece of memory that several processes map. It has no name, so it ends with its last user."""

    __slots__ = ("_gone", "array", "fd", "key", "map", "size")

    def __init__(self, key: str, fd: int, size: int, gone: deque[str] | None = None):
        self._gone = gone
        self.key = key
        self.fd = fd
        self.size = size
        self.map = mmap.mmap(fd, size)
        self.array = np.frombuffer(self.map, np.uint8)

    @classmethod
    def create(cls, key: str, size: int) -> Segment:
        """A fresh segment."""
        fd = _anonymous_file()
        try:
            os.ftruncate(fd, size)
            return cls(key, fd, size)
        except BaseException:
            os.close(fd)
            raise

    def __del__(self) -> None:
        if hasattr(self, "array"):  # else whoever made it closes the file
            os.close(self.fd)
            if self._gone is not None:
                self._gone.append(self.key)


def _anonymous_file() -> int:
    """A file in memory, or on a disk where the system has no such thing. Nobody else can open it."""
    if hasattr(os, "memfd_create"):
        try:
            return os.memfd_create("rollstream")
        except OSError as error:
            reason = str(error)
    else:
        reason = "this system has no memfd_create"
    warnings.warn(
        f"arrays travel through files in {tempfile.gettempdir()}, not through shared memory: {reason}",
        stacklevel=2,
    )
    fd, path = tempfile.mkstemp(prefix="rollstream")
    os.unlink(path)
    return fd


class Memory:
    """Some bytes of a segment with buffers in them. Whoever holds it keeps them from being reused."""

    __slots__ = ("layout", "offset", "segment", "size")

    def __init__(self, segment: Segment, offset: int, size: int, layout: Layout):
        self.segment = segment
        self.offset = offset
        self.size = size
        self.layout = layout

    def views(self) -> list[memoryview]:
        """The buffers, read-only, each keeping the whole alive."""
        exporter = _Exporter(self.size, np.uint8, self.segment.map, self.offset)
        exporter.memory = self
        whole = exporter.data.toreadonly()
        return [whole[offset : offset + size] for offset, size in self.layout]


class _Exporter(np.ndarray[Any, Any]):
    """Bytes whose readers keep a `Memory` alive.

    An array made from a view refers to the innermost array behind it. That has to be this one: so it is made
    from the map itself, not from another array.
    """

    memory: Memory


class Block(Memory):
    """Memory of this process's own arena; free again when it dies."""

    __slots__ = ("_arena",)

    def __init__(self, arena: Arena, segment: Segment, offset: int, size: int, layout: Layout):
        super().__init__(segment, offset, size, layout)
        self._arena = arena

    def __del__(self) -> None:
        self._arena.freed.append((self.segment, self.offset, self.size))


class Lease(Memory):
    """Memory of another process's arena; its owner is told when it dies."""

    __slots__ = ("_loan", "_returned")

    def __init__(
        self, segment: Segment, offset: int, size: int, layout: Layout, loan: int, returned: deque[int]
    ):
        super().__init__(segment, offset, size, layout)
        self._loan = loan
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._loan)


class Arena:
    """The memory a process sends from: a pool of fixed size, reused, and more where that is not enough.

    What goes beyond the pool is counted in `grown` and given back to the system when it is free again, but
    for the last piece, which is kept for the next time.
    """

    def __init__(self, name: str, pool: int):
        self.name = name
        self.pool = pool
        self.used = 0
        self.grown = 0
        """How often the pool did not suffice."""
        self.freed: deque[tuple[Segment, int, int]] = deque()
        """Blocks that died, in any thread, at any moment."""
        self.retired: deque[str] = deque()
        """Keys of segments given back: whoever has mapped them should let go."""
        self._free: dict[Segment, list[tuple[int, int]]] = {}
        self._base: Segment | None = None
        self._spare: Segment | None = None
        self._made = 0
        self._lock = threading.Lock()

    def fits(self, size: int) -> bool:
        """Whether so many bytes are free in the pool."""
        with self._lock:
            self._collect()
            return self._find(_rounded(size)) is not None

    def store(self, buffers: Sequence[memoryview]) -> Block:
        """Copy buffers into one block."""
        layout, size = [], 0
        for buffer in buffers:
            layout.append((size, buffer.nbytes))
            size += _rounded(buffer.nbytes)
        block = self._allocate(size, tuple(layout))
        for (offset, length), buffer in zip(layout, buffers, strict=True):
            start = block.offset + offset
            block.segment.array[start : start + length] = np.frombuffer(buffer, np.uint8)
        return block

    def close(self) -> None:
        """Let go of all that nobody reads."""
        with self._lock:
            self._free.clear()
            self._base = self._spare = None
            self.freed = deque(maxlen=0)

    def _allocate(self, size: int, layout: Layout) -> Block:
        with self._lock:
            self._collect()
            found = self._find(size)
            if found is None:
                segment, offset = self._grow(size), 0
            else:
                segment, offset = found
            if segment is self._spare:
                self._spare = None
            self._take(segment, offset, size)
            return Block(self, segment, offset, size, layout)

    def _find(self, size: int) -> tuple[Segment, int] | None:
        if self._base is None:
            self._base = self._new_segment(self.pool)
        for segment, extents in self._free.items():
            for offset, length in extents:
                if length >= size:
                    return segment, offset
        return None

    def _take(self, segment: Segment, offset: int, size: int) -> None:
        extents = self._free[segment]
        index = bisect_left(extents, (offset,))
        _, length = extents[index]
        if length == size:
            del extents[index]
        else:
            extents[index] = (offset + size, length - size)
        self.used += size

    def _collect(self) -> None:
        """Join blocks that died to the free memory around them; segments beyond the pool go when empty."""
        while self.freed:
            segment, offset, size = self.freed.popleft()
            self.used -= size
            extents = self._free[segment]
            index = bisect_left(extents, (offset,))
            if index < len(extents) and extents[index][0] == offset + size:
                size += extents.pop(index)[1]
            if index and sum(extents[index - 1]) == offset:
                offset, before = extents.pop(index - 1)
                size += before
                index -= 1
            extents.insert(index, (offset, size))
            if size == segment.size and segment is not self._base:
                if self._spare is not None and self._spare is not segment:
                    del self._free[self._spare]
                    self.retired.append(self._spare.key)
                self._spare = segment

    def _grow(self, size: int) -> Segment:
        self.grown += 1
        return self._new_segment(max(size, self.pool // 4))

    def _new_segment(self, size: int) -> Segment:
        self._made += 1
        size = -size // mmap.PAGESIZE * -mmap.PAGESIZE
        segment = Segment.create(f"{self.name}/{self._made}", size)
        self._free[segment] = [(0, size)]
        return segment


def room_for(buffers: Sequence[memoryview]) -> int:
    """How many bytes a block with these buffers takes."""
    return sum(_rounded(buffer.nbytes) for buffer in buffers)


def _rounded(size: int) -> int:
    return -size // ALIGNMENT * -ALIGNMENT or ALIGNMENT
