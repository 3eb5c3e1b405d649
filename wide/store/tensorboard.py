"""TensorBoard's event files, written: numbers by name and step. Knows the format; no library is needed for so little.

A file is a row of records: length, a checksum of that, data, a checksum of that. Data is an Event in protobuf's
encoding: wall_time (1, double), step (2, varint), file_version (3, string), summary (5) with values (1) that have a
tag (1, string) and a simple_value (2, float). Checksums are CRC-32C, turned by 15 bits and moved on by a constant.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

MASK_DELTA = 0xA282EAD8
POLYNOMIAL = 0x82F63B78  # of CRC-32C, its bits in reverse
DOUBLE, TEXT, FLOAT = 1, 2, 5  # how protobuf marks what follows: eight bytes, a length and so many, four bytes


def _table() -> tuple[int, ...]:
    found = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (POLYNOMIAL if value & 1 else 0)
        found.append(value)
    return tuple(found)


CRC = _table()


class EventFile:
    """In a run's folder. What writes to the disk is handed to `beside`, which does it when and where it likes; if that
    fails, nothing more is written, and `tell` hears of it once.
    """

    def __init__(self, folder: Path, beside: Callable[[Callable[[], None]], None], tell: Callable[[str], None]) -> None:
        name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}"
        self._path, self._beside, self._tell = folder / name, beside, tell
        self._file: BinaryIO | None = None
        self._has_failed = False
        self._begin = record(event(time.time(), version="brain.Event:2"))

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        data = b"".join(record(event(at, step, name, value)) for name, value in values.items())
        self._beside(lambda: self._append(data))

    def close(self) -> None:
        self._beside(self._close)

    def _append(self, data: bytes) -> None:
        if self._has_failed:
            return
        try:
            if self._file is None:
                self._file = self._new()
                self._file.write(self._begin)
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self._has_failed = True
            self._tell(f"{self._path} is not written any more ({error.strerror}): TensorBoard sees what it has")

    def _new(self) -> BinaryIO:
        """Another process, or this one a moment ago, may have had that name."""
        for more in ("", *(f".{i}" for i in range(2, 100))):
            with contextlib.suppress(FileExistsError):
                return open(f"{self._path}{more}", "xb")
        raise FileExistsError(17, "too many files")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()


def event(at: float, step: int = 0, tag: str = "", value: float = 0.0, version: str = "") -> bytes:
    data = _key(1, DOUBLE) + struct.pack("<d", at)
    if version:
        return data + _text(3, version.encode())
    number = _text(1, tag.encode()) + _key(2, FLOAT) + struct.pack("<f", _narrow(value))
    return data + _key(2, 0) + _varint(step) + _text(5, _text(1, number))


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked(length)) + data + struct.pack("<I", masked(data))


def masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + MASK_DELTA) & 0xFFFFFFFF


def _narrow(value: float) -> float:
    """What a float of four bytes cannot hold is infinite there."""
    return value if abs(value) < 3.4e38 or value != value else float("inf") * (1 if value > 0 else -1)


def _key(field: int, kind: int) -> bytes:
    return bytes([field << 3 | kind])


def _text(field: int, data: bytes) -> bytes:
    return _key(field, TEXT) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*found, value])
