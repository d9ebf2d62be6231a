"""What processes hold of memory, read from /proc: for benchmarks that look for leaks. Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROCESSES = Path("/proc")
SEGMENTS = Path("/dev/shm")


@dataclass(frozen=True)
class Resident:
    """Bytes of a process that are in memory: its own, and those it shares with others."""

    own: int
    shared: int

    @property
    def total(self) -> int:
        return self.own + self.shared

    def __add__(self, other: Resident) -> Resident:
        return Resident(self.own + other.own, self.shared + other.shared)


def resident(pid: int) -> Resident:
    """RssAnon and RssShmem; nothing for a process that has ended."""
    fields: dict[str, int] = {}
    for line in _read(PROCESSES / str(pid) / "status").splitlines():
        name, _, value = line.partition(":")
        if name in ("RssAnon", "RssShmem"):
            fields[name] = int(value.split()[0]) * 1024
    return Resident(fields.get("RssAnon", 0), fields.get("RssShmem", 0))


def descendants(pid: int) -> list[int]:
    """The children of a process, their children, and so on, in the order of their numbers."""
    parents = {int(path.name): _parent(path) for path in PROCESSES.glob("[0-9]*")}
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return sorted(found)


def segments_held() -> set[str]:
    """Shared memory that this process holds open or has mapped, and all that has a name on this machine."""
    named = {str(path) for path in SEGMENTS.glob("*")} if SEGMENTS.exists() else set[str]()
    return named | set(_open_segments()) | set(_mapped_segments())


def _open_segments() -> Iterator[str]:
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the one that listed the folder is closed by now
            target = os.readlink(f"/proc/self/fd/{number}")
            if _is_shared(target):
                yield f"file descriptor {number}: {target}"


def _mapped_segments() -> Iterator[str]:
    for line in _read(PROCESSES / "self" / "maps").splitlines():
        addresses, *_ = line.split(maxsplit=1)
        path = line[line.find("/") :] if "/" in line else ""
        if _is_shared(path):
            yield f"mapping {addresses}: {path}"


def _is_shared(path: str) -> bool:
    return path.startswith(("/memfd:", f"{SEGMENTS}/"))


def _parent(path: Path) -> int:
    """The number after the name, which is in brackets and may hold anything, and the state."""
    fields = _read(path / "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has ended meanwhile
        return ""
