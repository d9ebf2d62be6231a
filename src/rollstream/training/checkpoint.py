"""Checkpoints: a state in a folder of its own, there as a whole or not at all.

`state.json` has the structure, `arrays.safetensors` the arrays, `weights.safetensors` the policy's weights by
themselves, and `manifest.json` a checksum of each. A folder is written under another name, flushed to the
disk and renamed, so a crash leaves either the whole of it or a leftover that the next save removes. One that
is replaced is set aside until the new one is in its place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load, save

from rollstream.engine import RollstreamError
from rollstream.training.plain import packed, unpacked

_FORMAT = 1
_NAME = re.compile(r"step_(\d+)(\.old)?")
_PARTIAL, _OLD = ".partial", ".old"
_FILES = ("state.json", "arrays.safetensors", "weights.safetensors")


class CheckpointError(RollstreamError):
    """A checkpoint that is not there, or is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole."""

    path: Path
    step: int
    state: Any


def save_checkpoint(
    folder: Path, step: int, state: Any, *, weights: Mapping[str, Any] | None = None, keep: int = 3
) -> Path:
    """Write a state as the folder's newest checkpoint, and remove all but the newest `keep`."""
    structure, arrays = packed(state)
    named, plain = packed(dict(weights or {}))
    files = {
        "state.json": json.dumps(structure, allow_nan=False).encode(),
        "arrays.safetensors": save(arrays),
        "weights.safetensors": save(plain),
    }
    manifest = {
        "format": _FORMAT,
        "step": step,
        "files": {name: {"bytes": len(data), "sha256": _checksum(data)} for name, data in files.items()},
        "dtypes": {name: own for name, own in named.items() if "dtype" in own},
    }
    files["manifest.json"] = json.dumps(manifest, indent=2).encode()
    for leftover in folder.glob(f"*{_PARTIAL}"):
        _removed(leftover)
    path = folder / f"step_{step:09d}"
    write_folder(path, files)
    for _, old in _found(folder)[keep:]:
        _removed(old)
    return path


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raise, naming the file, unless every byte is as it was written."""
    files = {name: _verified(path, name) for name in _FILES}
    state = unpacked(json.loads(files["state.json"]), load(files["arrays.safetensors"]))
    return Checkpoint(path, _manifest(path)["step"], state)


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Only the policy's weights of a checkpoint."""
    weights = load(_verified(path, "weights.safetensors"))
    return weights | unpacked(_manifest(path).get("dtypes", {}), weights)


def latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, or `None` if there is none at all. Warns of those that are not."""
    damaged: list[CheckpointError] = []
    for _, path in _found(folder):
        try:
            checkpoint = load_checkpoint(path)
        except CheckpointError as error:
            damaged.append(error)
            continue
        for error in damaged:
            warnings.warn(f"{error}; {path.name} is used instead", stacklevel=2)
        return checkpoint
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and no other checkpoint in {folder} is whole: begin a new run")
    return None


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints that are newer than a step: the training goes on from there."""
    for own, path in _found(folder):
        if own > step:
            _removed(path)


# Files -------------------------------------------------------------------------------------------


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have an error name what was to be written; a full disk, for one, does not."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder with these files, at once; one of that name is replaced."""
    partial, old = path.with_name(path.name + _PARTIAL), path.with_name(path.name + _OLD)
    try:
        with writing(path):
            partial.mkdir(parents=True)
            for name, data in files.items():
                _written(partial / name, data)
            _synced(partial)
    except OSError:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        _removed(old)
        os.rename(path, old)
    os.rename(partial, path)
    _synced(path.parent)
    _removed(old)


def write_file(path: Path, data: bytes) -> None:
    """Write a file, at once; one of that name is replaced."""
    partial = path.with_name(path.name + _PARTIAL)
    try:
        with writing(path):
            _written(partial, data)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
    _synced(path.parent)


def _written(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _synced(folder: Path) -> None:
    """Names of files are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _removed(path: Path) -> None:
    """Take away a folder, or a file, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _found(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints there are, newest first, and one that was set aside after what was to replace it."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted(steps, key=lambda found: (-found[0], found[1].name))


def _manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        known, form, _ = manifest["files"], manifest["format"], manifest["step"]
        assert all("sha256" in one for one in known.values())
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json cannot be read") from None
    if form != _FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {form}, not {_FORMAT}")
    return manifest


def _verified(path: Path, name: str) -> bytes:
    expected = _manifest(path)["files"].get(name, {})
    try:
        data = (path / name).read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing") from None
    except OSError:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} cannot be read") from None
    if len(data) != expected.get("bytes"):
        reason = f"{name} has {len(data):,} bytes instead of {expected.get('bytes', 0):,}"
        raise CheckpointError(f"checkpoint {path} is damaged: {reason}")
    if _checksum(data) != expected.get("sha256"):
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
    return data


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
