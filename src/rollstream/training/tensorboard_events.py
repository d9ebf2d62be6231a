"""TensorBoard's event files: protobuf messages in TensorFlow's record format.

tensorboardX writes them as well, but imports PyTorch and the clients of cloud storages where they are
installed; PyTorch alone takes 3 to 25 s.
"""

from __future__ import annotations

import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path

_VERSION = b"brain.Event:2"
_POLYNOMIAL = 0x82F63B78
_MASK_DELTA = 0xA282EAD8
_SESSION_START = b"\x08\x01"
"""`SessionLog(status=START)`."""


class EventFile:
    """A new event file, to which scalars are written at once.

    Args:
        folder: Where it is created.
        start_step: Events of later steps in older files are superseded; 0 if there are none.
    """

    def __init__(self, folder: Path, start_step: int = 0):
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{os.getpid()}.{start_step}"
        self._file = (folder / name).open("wb")
        self._write(_bytes_field(3, _VERSION))
        if start_step:
            self._write(_step_field(start_step + 1) + _bytes_field(7, _SESSION_START))

    def add(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of a step as one event."""
        values = (
            _bytes_field(1, _bytes_field(1, name.encode()) + b"\x15" + _float32(value))
            for name, value in scalars.items()
        )
        self._write(_step_field(step) + _bytes_field(5, b"".join(values)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, fields: bytes) -> None:
        """Write an event, which begins with its time, as a record."""
        event = b"\x09" + struct.pack("<d", time.time()) + fields
        length = struct.pack("<Q", len(event))
        self._file.write(length + _checksum(length) + event + _checksum(event))
        self._file.flush()


def _step_field(step: int) -> bytes:
    return b"\x10" + _varint(step)


def _bytes_field(number: int, value: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _float32(value: float) -> bytes:
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", math.copysign(math.inf, value))


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (_POLYNOMIAL if byte & 1 else 0)
    return byte


_REMAINDERS = [_remainder(byte) for byte in range(256)]


def _checksum(data: bytes) -> bytes:
    """The masked CRC-32C of a record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _REMAINDERS[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + _MASK_DELTA) & 0xFFFFFFFF)
