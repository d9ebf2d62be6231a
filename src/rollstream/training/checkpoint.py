"""Checkpoints: one directory per step, complete or absent.

`state.json` holds the structure of the state, `arrays.safetensors` its arrays, `weights.safetensors` the
policy's weights, and `manifest.json` a checksum of each file. A checkpoint is written under a temporary name,
synced and renamed, so that a crash leaves either all of it or a leftover that the next save removes. One that
is replaced is kept as `.old` until the new one is in place.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from rollstream.atomic_files import PARTIAL, named_errors, sync_directory, write_and_sync
from rollstream.background_save import read_arrays, read_checksum, write_arrays
from rollstream.engine import RollstreamError
from rollstream.state_codec import decode_state, encode_state

_FORMAT = 4
_NAME = re.compile(r"step_(\d+)(\.old)?")
_OLD = ".old"
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, SafetensorError)
"""Errors that a file of another structure causes."""
_FILES = ("state.json", "arrays.safetensors", "weights.safetensors")


class CheckpointError(RollstreamError):
    """A checkpoint is missing or damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified."""

    path: Path
    step: int
    state: Any
    run: Mapping[str, Any]
    """The identity of the run that saved it (see `rollstream.training.identity`)."""


class CheckpointWriter:
    """Writes a checkpoint under a temporary name, until `commit`.

    Actors may meanwhile write large states to files in `partial` (see `rollstream.background_save`). As a
    context manager, it removes everything after an error.

    Args:
        folder: of the checkpoints; leftovers of interrupted writers are removed.
        step: environment steps so far.
        run: identity of the run, kept in the manifest.
    """

    def __init__(self, folder: Path, step: int, run: Mapping[str, Any] | None = None):
        for leftover in folder.glob(f"*{PARTIAL}"):
            _remove(leftover)
        self.step = step
        self._run = dict(run or {})
        self._folder = folder
        self._path = folder / f"step_{step:09d}"
        self.partial = self._path.with_name(self._path.name + PARTIAL)
        self._manifest: dict[str, Any] = {}
        self._external: list[Path] = []
        with named_errors(self._path):
            self.partial.mkdir(parents=True)

    def write(self, state: Any, weights: Mapping[str, Any], actor_files: Iterable[str] = ()) -> None:
        """Write state and weights; actors write the external files."""
        structure, arrays = encode_state(state)
        weight_structure, weight_arrays = encode_state(dict(weights))
        text = json.dumps(structure, allow_nan=False).encode()
        with named_errors(self._path):
            write_and_sync(self.partial / "state.json", text)
            files = {
                "state.json": {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()},
                "arrays.safetensors": write_arrays(self.partial / "arrays.safetensors", arrays),
                "weights.safetensors": write_arrays(self.partial / "weights.safetensors", weight_arrays),
            }
        self._external = [self.partial / name for name in actor_files]
        self._manifest = {
            "format": _FORMAT,
            "step": self.step,
            "run": self._run,
            "files": files,
            "dtypes": {name: array for name, array in weight_structure.items() if "dtype" in array},
        }

    @property
    def is_complete(self) -> bool:
        """Whether all external files have been written."""
        return all(read_checksum(path) is not None for path in self._external)

    def commit(self, keep: int | None) -> Path:
        """Rename to the final name, replacing an older one, and keep only the newest `keep` checkpoints."""
        if not self.is_complete:
            raise CheckpointError(f"checkpoint {self._path} is incomplete: actors are still writing to it")
        path, old = self._path, self._path.with_name(self._path.name + _OLD)
        self._manifest["files"] |= {file.name: read_checksum(file) for file in self._external}
        with named_errors(self._path):
            write_and_sync(self.partial / "manifest.json", json.dumps(self._manifest, indent=2).encode())
            sync_directory(self.partial)
        if path.exists():
            _remove(old)
            os.rename(path, old)
        os.rename(self.partial, path)
        sync_directory(path.parent)
        _remove(old)
        for _, older in _list(self._folder)[keep:] if keep is not None else ():
            _remove(older)
        return path

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.partial, ignore_errors=True)

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        if kind is not None:
            self.discard()


def save_checkpoint(
    folder: Path,
    step: int,
    state: Any,
    *,
    weights: Mapping[str, Any] | None = None,
    keep: int | None = 3,
    run: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint; keep only the newest `keep`, or all for `None`."""
    with CheckpointWriter(folder, step, run) as writer:
        writer.write(state, weights or {})
        return writer.commit(keep)


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint and verify the checksum of every file."""
    manifest = _read_manifest(path)
    for name in {*_FILES, *manifest["files"]}:
        _verify(path, name)
    with _described_damage(path):
        arrays, _ = read_arrays(path / "arrays.safetensors")
        state = decode_state(json.loads((path / "state.json").read_bytes()), arrays)
    return Checkpoint(path, manifest["step"], state, manifest["run"])


def load_weights(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Read only the policy's weights from a checkpoint."""
    _verify(path, "weights.safetensors")
    with _described_damage(path):
        weights, _ = read_arrays(path / "weights.safetensors")
        return weights | decode_state(_read_manifest(path).get("dtypes", {}), weights)


def latest_checkpoint(
    folder: Path, other_run: Callable[[Mapping[str, Any]], str | None] = lambda _: None
) -> Checkpoint | None:
    """Load the newest undamaged checkpoint; warn of damaged newer ones. `None` if there is no checkpoint.

    Args:
        folder: of the checkpoints.
        other_run: given the identity that a checkpoint carries, returns why it is not of the run, or `None`.
    """
    damaged: list[CheckpointError] = []
    for _, path in _list(folder):
        try:
            checkpoint = load_checkpoint(path)
            if (reason := other_run(checkpoint.run)) is not None:
                raise CheckpointError(f"checkpoint {path} {reason}")
        except CheckpointError as error:
            damaged.append(error)
            continue
        for error in damaged:
            warnings.warn(f"{error}; using {path.name} instead", stacklevel=2)
        return checkpoint
    if damaged:
        raise CheckpointError(f"{damaged[0]}, and {folder} has no other checkpoint that can be used")
    return None


def newest_step(folder: Path) -> int | None:
    """The step of the newest checkpoint, whole or not; `None` if there is none."""
    return max((step for step, _ in _list(folder)), default=None)


def oldest_step(folder: Path) -> int:
    """The step of the oldest checkpoint."""
    return min(step for step, _ in _list(folder))


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints newer than a step, from which the run is resumed."""
    for found, path in _list(folder):
        if found > step:
            _remove(path)


def remove_before(folder: Path, step: int) -> None:
    """Of the checkpoints up to a step, keep only the newest: no run is resumed from before that step."""
    for _, path in [found for found in _list(folder) if found[0] <= step][1:]:
        _remove(path)


# Files -------------------------------------------------------------------------------------------


def _remove(path: Path) -> None:
    """Remove a directory or file, if it exists."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _list(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints with their steps, newest first; an `.old` one follows its replacement."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = [(int(match[1]), path) for path in paths if (match := _NAME.fullmatch(path.name))]
    return sorted(steps, key=lambda found: (-found[0], found[1].name))


@contextmanager
def _described_damage(path: Path) -> Iterator[None]:
    """Turn errors that files of another structure cause, checksums or not, into a sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except (*_DAMAGE, RollstreamError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"checkpoint {path} is damaged: {reason}") from None


def _read_manifest(path: Path) -> dict[str, Any]:
    if not (path / "manifest.json").is_file():
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json is missing")
    try:
        manifest = json.loads((path / "manifest.json").read_bytes())
        version = manifest["format"]
        is_valid = version != _FORMAT or _is_manifest(manifest)
    except (OSError, *_DAMAGE):
        version, is_valid, manifest = _FORMAT, False, {}
    if not is_valid:
        raise CheckpointError(f"checkpoint {path} is damaged: manifest.json cannot be read")
    if version != _FORMAT:
        reason = f"has format {version!r}, not {_FORMAT}, and so is of another version of Rollstream"
        raise CheckpointError(f"checkpoint {path} {reason}")
    if manifest["step"] != _step(path):
        raise CheckpointError(f"checkpoint {path} is damaged: its manifest is of step {manifest['step']}")
    return manifest


def _is_manifest(manifest: Mapping[str, Any]) -> bool:
    files = manifest["files"]
    return (
        all("/" not in name and type(file["bytes"]) is int and file["sha256"] for name, file in files.items())
        and isinstance(manifest["run"], dict)
        and isinstance(manifest["dtypes"], dict)
        and type(manifest["step"]) is int
    )


def _step(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def _verify(path: Path, name: str) -> None:
    """Compare size and checksum with the manifest; files may be larger than memory."""
    if not (path / name).exists():
        raise CheckpointError(f"checkpoint {path} is damaged: {name} is missing")
    try:
        if not (path / name).is_file():
            raise OSError("not a plain file")
        with (path / name).open("rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
            length = file.tell()
    except OSError:
        raise CheckpointError(f"checkpoint {path} is damaged: {name} cannot be read") from None
    expected = _read_manifest(path)["files"].get(name, {})
    if length != expected.get("bytes"):
        reason = f"{name} has {length:,} bytes instead of {expected.get('bytes', 0):,}"
        raise CheckpointError(f"checkpoint {path} is damaged: {reason}")
    if checksum != expected.get("sha256"):
        raise CheckpointError(f"checkpoint {path} is damaged: {name} has a wrong checksum")
