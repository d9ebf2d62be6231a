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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rollstream.atomic_files import PARTIAL, synced, writing, written
from rollstream.background_save import read_arrays, summary, write_arrays
from rollstream.engine import RollstreamError
from rollstream.state_codec import packed, unpacked

_FORMAT = 2
_NAME = re.compile(r"step_(\d+)(\.old)?")
_OLD = ".old"
_FILES = ("state.json", "arrays.safetensors", "weights.safetensors")


class CheckpointError(RollstreamError):
    """A checkpoint that is not there, or is damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """One that was read and found whole."""

    path: Path
    step: int
    state: Any


class Draft:
    """A checkpoint that is not whole yet: a folder of another name, until `finish`.

    Whoever has a large state may write it to a file in `partial` meanwhile (see
    `rollstream.background_save`). As a context, nothing is left of it after an error.

    Args:
        folder: of checkpoints; what is left in it of one that was never finished is removed.
        step: how far the training is.
    """

    def __init__(self, folder: Path, step: int):
        for leftover in folder.glob(f"*{PARTIAL}"):
            _removed(leftover)
        self.step = step
        self._folder = folder
        self._path = folder / f"step_{step:09d}"
        self.partial = self._path.with_name(self._path.name + PARTIAL)
        self._about: dict[str, Any] = {}
        self._apart: list[Path] = []
        with writing(self._path):
            self.partial.mkdir(parents=True)

    def write(self, state: Any, weights: Mapping[str, Any], apart: Iterable[str] = ()) -> None:
        """Write a state and weights; files of these names are written by others."""
        structure, arrays = packed(state)
        named, plain = packed(dict(weights))
        text = json.dumps(structure, allow_nan=False).encode()
        with writing(self._path):
            written(self.partial / "state.json", text)
            files = {
                "state.json": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
                "arrays.safetensors": write_arrays(self.partial / "arrays.safetensors", arrays),
                "weights.safetensors": write_arrays(self.partial / "weights.safetensors", plain),
            }
        self._apart = [self.partial / name for name in apart]
        self._about = {
            "format": _FORMAT,
            "step": self.step,
            "files": files,
            "dtypes": {name: own for name, own in named.items() if "dtype" in own},
        }

    @property
    def whole(self) -> bool:
        """Whether all that others write is there."""
        return all(summary(path) is not None for path in self._apart)

    def finish(self, keep: int | None) -> Path:
        """Give it its name, in place of one there may be, and remove all but the newest `keep`, if told."""
        if not self.whole:
            raise CheckpointError(f"checkpoint {self._path} is not whole: others still write to it")
        path, old = self._path, self._path.with_name(self._path.name + _OLD)
        self._about["files"] |= {own.name: summary(own) for own in self._apart}
        with writing(self._path):
            written(self.partial / "manifest.json", json.dumps(self._about, indent=2).encode())
            synced(self.partial)
        if path.exists():
            _removed(old)
            os.rename(path, old)
        os.rename(self.partial, path)
        synced(path.parent)
        _removed(old)
        for _, older in _found(self._folder)[keep:] if keep is not None else ():
            _removed(older)
        return path

    def discard(self) -> None:
        """It will not be whole."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.discard()


def save_checkpoint(
    folder: Path, step: int, state: Any, *, weights: Mapping[str, Any] | None = None, keep: int | None = 3
) -> Path:
    """Write a state as the folder's newest checkpoint, and remove all but the newest `keep`, if told."""
    with Draft(folder, step) as draft:
        draft.write(state, weights or {})
        return draft.finish(keep)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint; raise, naming the file, unless every byte is as it was written."""
    for name in {*_FILES, *_manifest(path)["files"]}:
        _verify(path, name)
    arrays, _ = read_arrays(path / "arrays.safetensors")
    state = unpacked(json.loads((path / "state.json").read_bytes()), arrays)
    return Checkpoint(path, _manifest(path)["step"], state)


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Only the policy's weights of a checkpoint."""
    _verify(path, "weights.safetensors")
    weights, _ = read_arrays(path / "weights.safetensors")
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


def oldest(folder: Path) -> int:
    """How far the training was at the oldest checkpoint there is."""
    return min(step for step, _ in _found(folder))


def remove_before(folder: Path, step: int) -> None:
    """Remove checkpoints that are older than the newest up to a step: nobody goes back to before that."""
    for _, path in [found for found in _found(folder) if found[0] <= step][1:]:
        _removed(path)


# Files -------------------------------------------------------------------------------------------


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
        if not all("sha256" in one for one in known.values()):
            raise KeyError("sha256")
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json is missing") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json cannot be read") from None
    if form != _FORMAT:
        raise CheckpointError(f"checkpoint {path} has format {form}, not {_FORMAT}")
    return manifest


def _verify(path: Path, name: str) -> None:
    """Raise unless a file, which may be too large to have in memory, is as it was written."""
    try:
        with (path / name).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except FileNotFoundError:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing") from None
    except OSError:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} cannot be read") from None
    expected = _manifest(path)["files"].get(name, {})
    if length != expected.get("bytes"):
        reason = f"{name} has {length:,} bytes instead of {expected.get('bytes', 0):,}"
        raise CheckpointError(f"checkpoint {path} is damaged: {reason}")
    if checksum != expected.get("sha256"):
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what was written")
