"""TensorBoard's event files, read by the protobuf messages and the checksum of another implementation."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

from rollstream.training.tensorboard_events import EventFile, _checksum

SCALARS = {"time/fps": 3.25, "train/loss": -1e-3, "größe": 0.0, "x" * 300: 1e300, "nan": math.nan}


def events(path: Path) -> list[Any]:
    """The events of a file, whose checksums are right."""
    data, found = path.read_bytes(), []
    while data:
        [length] = struct.unpack("<Q", data[:8])
        for start, stop in ((0, 8), (12, 12 + length)):
            crc = crc32c(data[start:stop])
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
            assert data[stop : stop + 4] == struct.pack("<I", masked)
        message: Any = event_pb2
        found.append(message.Event.FromString(data[12 : 12 + length]))
        data = data[16 + length :]
    return found


def written(folder: Path, start_step: int) -> list[Any]:
    file = EventFile(folder, start_step)
    [path] = folder.glob("*tfevents*")
    file.add(1 << 40, SCALARS)
    readable = events(path)  # before the file is closed
    file.close()
    return readable


def test_scalars_are_readable_at_once(tmp_path: Path) -> None:
    version, event = written(tmp_path, 0)
    assert version.file_version == "brain.Event:2"
    assert event.step == 1 << 40
    assert 0 <= event.wall_time - version.wall_time < 60
    values = {value.tag: value.simple_value for value in event.summary.value}
    assert list(values) == list(SCALARS)
    assert values.pop("x" * 300) == math.inf
    assert math.isnan(values.pop("nan"))
    assert values == {
        "time/fps": 3.25,
        "train/loss": struct.unpack("f", struct.pack("f", -1e-3))[0],
        "größe": 0,
    }


def test_a_resumed_run_supersedes_later_events(tmp_path: Path) -> None:
    _, start, event = written(tmp_path, 500)
    assert (start.step, start.session_log.status) == (501, event_pb2.SessionLog.START)  # pyright: ignore
    assert event.step == 1 << 40


@given(st.binary(max_size=50))
def test_checksums_are_those_of_another_implementation(data: bytes) -> None:
    crc = crc32c(data)
    assert _checksum(data) == struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def test_training_imports_neither_tensorboardx_nor_pytorch() -> None:
    """With PyTorch installed, they take seconds."""
    code = "import sys, rollstream.training.run; print({'torch', 'tensorboardX'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
