"""The least a broadcast and a gather between processes can cost: memory they share, and a byte to signal.

No pickling, no bookkeeping, nothing allocated on the way. The driver copies the array once into a block that
every process maps; each process makes a fresh array from it and copies that into a block of its own, which
the driver maps, too. `broadcast_gather.py` compares with it, and this file is also what its processes run.
It needs Linux, for memory without a name (memfd).
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
LENGTH_BYTES = 8
REPLY = b"."


def is_possible() -> bool:
    return hasattr(os, "memfd_create")


class BareSharedMemory:
    """Some processes, a block for the broadcast, and a block for the answer of each."""

    def __init__(self, count: int, capacity: int):
        self._descriptors = [_block(capacity) for _ in range(count + 1)]
        self._broadcast, *self._answers = (_view(number, capacity) for number in self._descriptors)
        self._sockets: list[socket.socket] = []
        self._processes = [self._start(own, capacity) for own in self._descriptors[1:]]

    def _start(self, own: int, capacity: int) -> subprocess.Popen[bytes]:
        here, there = socket.socketpair()
        self._sockets.append(here)
        passed = (there.fileno(), self._descriptors[0], own)
        command = [sys.executable, __file__, *map(str, passed), str(capacity)]
        with there:
            return subprocess.Popen(command, pass_fds=passed)

    def exchange(self, array: Array) -> list[Array]:
        """One array to all, and a fresh one back from each: views, valid until the next exchange."""
        length = len(array)
        self._broadcast[:length] = array
        signal = length.to_bytes(LENGTH_BYTES, "little")
        for connection in self._sockets:
            connection.sendall(signal)
        for connection in self._sockets:
            if connection.recv(1) != REPLY:
                raise ConnectionError("a process of the bare comparison ended early")
        return [answer[:length] for answer in self._answers]

    def __enter__(self) -> BareSharedMemory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._sockets:
            connection.close()  # which is how a process is told to end
        for process in self._processes:
            process.wait()
        for number in self._descriptors:
            os.close(number)


def _block(capacity: int) -> int:
    number = os.memfd_create("bare_shared_memory")
    os.truncate(number, capacity)
    return number


def _view(number: int, capacity: int) -> Array:
    return np.frombuffer(mmap.mmap(number, capacity), dtype=np.float32)


def answer_until_told(connection: int, broadcast: int, own: int, capacity: int) -> None:
    """What each process does."""
    source, target = _view(broadcast, capacity), _view(own, capacity)
    with socket.socket(fileno=connection) as driver:
        while signal := driver.recv(LENGTH_BYTES):
            length = int.from_bytes(signal, "little")
            fresh = source[:length] + np.float32(1)
            target[:length] = fresh
            driver.sendall(REPLY)


if __name__ == "__main__":
    answer_until_told(*map(int, sys.argv[1:]))
