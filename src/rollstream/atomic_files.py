"""Files that are there as a whole or not at all, and stay when the machine stops."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"
"""How names of files and folders end that are not whole yet."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have an error name what was to be written; a full disk, for one, does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_file(path: Path, data: bytes) -> None:
    """Write a file, at once; one of that name is replaced."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with writing(path):
            written(partial, data)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
    synced(path.parent)


def written(path: Path, data: bytes) -> None:
    """Write a file, to the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def synced(folder: Path) -> None:
    """Names of files are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
