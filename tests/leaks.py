"""What a process holds and a test could leave behind: threads, processes, file descriptors, shared memory."""

from __future__ import annotations

import gc
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

PATIENCE = 5.0
"""Seconds that threads which are ending may take after a test."""

SEGMENTS = Path("/dev/shm")
"""Where Linux shows shared memory."""


class Leaks:
    """Finds what this process holds that it did not hold when this was made."""

    def __init__(self) -> None:
        self._threads, self._before = _threads(), _held()

    def found(self) -> list[str]:
        """What is new, in words, once threads that are ending have ended."""
        deadline = time.monotonic() + PATIENCE
        for thread in _threads() - self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._new():
            gc.collect()  # something in a cycle is late, not lost
        return self._new()

    def _new(self) -> list[str]:
        after = {key: what for key, what in _held().items() if key not in self._before}
        return sorted(what for key, what in after.items() if not isinstance(key, Path) or _is_ours(key))


def _threads() -> set[threading.Thread]:
    """Threads made in Python; a dummy stands for one that a library made, and cannot be joined."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def _held() -> dict[object, str]:
    """What this process holds, by identity, in words; outside Linux its threads only."""
    held: dict[object, str] = {thread: f"thread {thread.name!r}" for thread in _threads()}
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in _read(children).split():
            command = _read(Path("/proc", pid, "cmdline")).replace("\0", " ").strip()
            held["process", pid] = f"process {pid} ({command or 'ended, but not waited for'})"
    for number, target in _open_files("self").items():
        if int(number) <= 2 or target.endswith(".ttf"):  # pytest's own; fonts that matplotlib has drawn with
            continue
        if not (target.startswith("socket:") and _is_of_ray(int(number))):
            held["file descriptor", number, target] = f"file descriptor {number} ({target})"
    for segment in SEGMENTS.glob("*"):
        held[segment] = f"shared memory {segment}"
    return held


def _is_of_ray(number: int) -> bool:
    """Whether a socket is a TCP connection, where Ray runs: it keeps them as it likes. Engines have none."""
    if "ray" not in sys.modules or not sys.modules["ray"].is_initialized():
        return False
    try:
        with socket.socket(fileno=os.dup(number)) as connection:
            return connection.family in (socket.AF_INET, socket.AF_INET6)
    except OSError:  # closed meanwhile
        return True


def _is_ours(segment: Path) -> bool:
    """Whether nobody else uses a segment or has just ended it: the whole machine shares one folder."""
    for pid in (path.name for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())):
        if str(segment) in _open_files(pid).values() or str(segment) in _read(Path("/proc", pid, "maps")):
            return False
    return segment.exists() and segment.stat().st_uid == os.getuid()


def _open_files(pid: str) -> dict[str, str]:
    """What each file descriptor of a process stands for, as far as we may look."""
    files: dict[str, str] = {}
    with suppress(OSError):
        for number in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # the one that listed the folder is closed by now
                files[number] = os.readlink(f"/proc/{pid}/fd/{number}").removesuffix(" (deleted)")
    return files


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended, or is not ours to look at
        return ""
