"""End every process that a test started, however the test ended.

Processes inherit the mark of their test in an environment variable, so they are found wherever they are by
then: a child, an orphan, or in a session of its own. Run as a program, this file waits until the test run
that started it has ended, then kills every process that still carries that run's mark.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

VARIABLE = "ROLLSTREAM_TEST"


@contextmanager
def marking(mark: str) -> Iterator[None]:
    """Processes started meanwhile carry the mark."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = mark
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


def kill(mark: str) -> None:
    """Kill every process with this mark, and those of its parts, `mark.1` and so on."""
    while pids := _marked(mark):  # one that was killed may just have started another
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _collect(pids)


def _marked(mark: str) -> list[int]:
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:  # not Linux
        return []
    return [pid for pid in pids if pid != os.getpid() and _has(pid, f"{VARIABLE}={mark}".encode())]


def _has(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # that of a process that has ended is empty
            entries = file.read().split(b"\0")
    except OSError:
        return False
    return any(own == entry or own.startswith(entry + b".") for own in entries)


def _collect(pids: list[int]) -> None:
    """Wait for children of ours, which would stay in the table of processes."""
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.stdin.read()
    kill(sys.argv[1])
