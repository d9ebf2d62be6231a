"""Large actor states, each saved to its own file while the actor keeps working.

An actor with a large state implements three methods: `save_to(path)` starts writing and returns at once,
`wait_saved()` waits for the write and returns an error message or `None`, and `load_from(path)` restores the
state. The file is safetensors with the structure in its metadata. A second file next to it, written last,
holds its size and checksum: without that one, the file is incomplete.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import safe_open

from rollstream.atomic_files import write_atomically
from rollstream.state_codec import Arrays, decode_state, encode_state

_CHUNK = 1 << 24
_DTYPES = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}


class BackgroundSave:
    """A forked process writes a state to a file and exits, while this process continues.

    The fork sees a snapshot of memory and costs only the copy of the page tables. It is safe only in
    processes whose threads hold no locks, such as actor processes that do not use JAX.
    """

    def __init__(self, path: Path, state: Callable[[], Any]):
        self._path = path
        self._pid: int | None = None
        self._error: str | None = None
        reader, writer = os.pipe()
        self._pipe = os.fdopen(reader, "rb")
        parent = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:  # out of memory, for example
            self._error = f"could not fork a process to write {path.name}: {error.strerror}"
        if self._pid == 0:
            _write_and_exit(path, state, parent, writer)
        os.close(writer)

    def wait(self) -> str | None:
        """Wait for the write to end; return what went wrong, if anything."""
        with self._pipe:
            message = self._pipe.read().decode()
        if self._pid is None:
            return self._error
        _, status = os.waitpid(self._pid, 0)
        if status == 0:
            return None
        killed = os.WIFSIGNALED(status)
        how = f"was killed by signal {os.WTERMSIG(status)}" if killed else f"exited with {status >> 8}"
        return message or f"the process writing {self._path.name} {how}"


def _write_and_exit(path: Path, state: Callable[[], Any], parent: int, pipe: int) -> NoReturn:
    """Run in the fork: ignore signals meant for the driver, and give up when the parent is gone."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        write_state(path, state(), still_needed=lambda: os.getppid() == parent)
        status = 0
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.write(pipe, (str(error) or repr(error)).encode()[:4096])
    finally:
        os._exit(status)


def write_state(path: Path, state: Any, still_needed: Callable[[], bool] = lambda: True) -> None:
    """Write a state without copying its arrays; stop with an error once it is no longer needed."""
    structure, arrays = encode_state(state)
    checksum = write_arrays(path, arrays, {"structure": json.dumps(structure)}, still_needed)
    write_atomically(_checksum_path(path), json.dumps(checksum).encode())


def write_arrays(
    path: Path,
    arrays: Arrays,
    metadata: Mapping[str, str] | None = None,
    still_needed: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Write arrays as safetensors, chunk by chunk, and sync; return the file's size and checksum."""
    length, checksum = 0, hashlib.sha256()
    with path.open("wb") as file:
        for chunk in _chunks(arrays, metadata or {}):
            if not still_needed():
                raise InterruptedError(f"{path.name} is no longer needed: its owner is gone")
            file.write(chunk)
            checksum.update(chunk)
            length += len(chunk)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "sha256": checksum.hexdigest()}


def read_checksum(path: Path) -> dict[str, Any] | None:
    """Size and checksum of a file that was written completely; `None` for any other."""
    try:
        return json.loads(_checksum_path(path).read_bytes())
    except FileNotFoundError:
        return None


def read_state(path: Path) -> Any:
    """Read what `write_state` has written."""
    arrays, metadata = read_arrays(path)
    return decode_state(json.loads(metadata["structure"]), arrays)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """Read the arrays and the metadata of a safetensors file."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _chunks(arrays: Arrays, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield a safetensors file: the length of its header, the header, the data."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _dtype(array), "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        if array.nbytes:
            data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for start in range(0, len(data), _CHUNK):
                yield data[start : start + _CHUNK]


def _dtype(array: np.ndarray[Any, Any]) -> str:
    kind = _DTYPES[array.dtype.kind]
    return kind if kind == "BOOL" else f"{kind}{8 * array.itemsize}"


def _checksum_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
