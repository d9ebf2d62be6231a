"""Files that are written whole or not at all, and survive a power failure."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""Suffix of files and directories that are still being written."""


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Set the filename of an `OSError`, which is missing when the disk is full, for example."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file under a temporary name, then rename it; replaces an existing file."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with named_errors(path):
            write_and_sync(partial, data)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
    sync_directory(path.parent)


def write_and_sync(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write a file, at once or in parts, and flush it to disk."""
    with path.open("wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory to disk: only then are new file names durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
