"""Large states, each in a file of its own that its owner writes, while it goes on.

An actor whose state is large offers `save_to(path)`, which begins to write it and comes back at once;
`wait_saved()`, which waits until that is done and gives what went wrong; and `load_from(path)`. A file is
safetensors with the structure in its metadata. Another beside it, written last, says how long it is and what
its checksum is: a file without one is not whole.
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

from rollstream.atomic_files import write_file
from rollstream.state_codec import Arrays, packed, unpacked

_PIECE = 1 << 24
_TYPES = {"b": "BOOL", "i": "I", "u": "U", "f": "F"}


class Writing:
    """A copy of this process writes a state to a file and ends; meanwhile this one goes on.

    A fork sees memory as it is now, and costs what copying the page tables does. Only for processes whose
    threads hold no locks, such as those of actors that do not use JAX.
    """

    def __init__(self, path: Path, state: Callable[[], Any]):
        self._path = path
        self._pid: int | None = None
        self._reason: str | None = None
        reading, writing = os.pipe()
        self._told = os.fdopen(reading, "rb")
        owner = os.getpid()
        try:
            self._pid = os.fork()
        except OSError as error:  # as when memory is short
            self._reason = f"no process could be made to write {path.name}: {error.strerror}"
        if self._pid == 0:
            _write_and_end(path, state, owner, writing)
        os.close(writing)

    def wait(self) -> str | None:
        """What went wrong, if anything did, once it has ended."""
        with self._told:
            said = self._told.read().decode()
        if self._pid is None:
            return self._reason
        _, status = os.waitpid(self._pid, 0)
        if status == 0:
            return None
        how = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"itself, with {status >> 8}"
        return said or f"the process that wrote {self._path.name} was ended by {how}"


def _write_and_end(path: Path, state: Callable[[], Any], owner: int, pipe: int) -> NoReturn:
    """In the copy: signals that are for the driver pass it by, and without its owner it is of no use."""
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        write_state(path, state(), needed=lambda: os.getppid() == owner)
        status = 0
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.write(pipe, (str(error) or repr(error)).encode()[:4096])
    finally:
        os._exit(status)


def write_state(path: Path, state: Any, needed: Callable[[], bool] = lambda: True) -> None:
    """Write a state without making a copy of it, as long as it is needed."""
    structure, arrays = packed(state)
    about = write_arrays(path, arrays, {"structure": json.dumps(structure)}, needed)
    write_file(_beside(path, "json"), json.dumps(about).encode())


def write_arrays(
    path: Path,
    arrays: Arrays,
    metadata: Mapping[str, str] | None = None,
    needed: Callable[[], bool] = lambda: True,
) -> dict[str, Any]:
    """Write arrays as safetensors, to the disk, a piece at a time: length and checksum of the file."""
    length, checksum = 0, hashlib.sha256()
    with path.open("wb") as file:
        for piece in _pieces(arrays, metadata or {}):
            if not needed():
                raise InterruptedError(f"whoever wanted {path.name} is gone")
            file.write(piece)
            checksum.update(piece)
            length += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return {"bytes": length, "sha256": checksum.hexdigest()}


def summary(path: Path) -> dict[str, Any] | None:
    """Length and checksum of a file that was written whole; `None` of one that was not, or not yet."""
    try:
        return json.loads(_beside(path, "json").read_bytes())
    except FileNotFoundError:
        return None


def read_state(path: Path) -> Any:
    """The state that was written."""
    arrays, metadata = read_arrays(path)
    return unpacked(json.loads(metadata["structure"]), arrays)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file, and what is said of them."""
    with safe_open(path, "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _pieces(arrays: Arrays, metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """What a safetensors file consists of: the length of its header, the header, the numbers."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, array in arrays.items():
        begin, end = end, end + array.nbytes
        header[name] = {"dtype": _type(array), "shape": list(array.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little")
    yield text
    for array in arrays.values():
        if array.nbytes:
            numbers = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
            for at in range(0, len(numbers), _PIECE):
                yield numbers[at : at + _PIECE]


def _type(array: np.ndarray[Any, Any]) -> str:
    kind = _TYPES[array.dtype.kind]
    return kind if kind == "BOOL" else f"{kind}{8 * array.itemsize}"


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")
