"""Byte planes: the first bytes of all numbers, then their second bytes, and so on. Knows bytes; knows no compressor.

The bytes that hold sign and exponent resemble each other and compress; among mantissas, which are noise, they hide.
Versions of weights are close as bit patterns too: their integer difference, zigzag, has zeros in its upper planes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
UNSIGNED: dict[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def split(raw: Bytes, width: int) -> Bytes:
    """`raw` as `width` rows, one per byte of a number. (nbytes,) -> (width, nbytes / width)"""
    columns = raw.reshape(-1, width)
    rows = np.empty((width, len(columns)), np.uint8)
    for i in range(width):  # four times as quick as one transposed copy
        rows[i] = columns[:, i]
    return rows


def put(row: Bytes, i: int, width: int, raw: Bytes) -> None:
    """Write plane `i` back to its places in `raw`."""
    raw.reshape(-1, width)[:, i] = row


def difference(new: Bytes, old: Bytes, width: int) -> Bytes:
    """How the numbers' bit patterns moved, as unsigned numbers that are small when the move was: 0, -1, 1, -2, …"""
    unsigned = UNSIGNED[width]
    moved = new.view(unsigned) - old.view(unsigned)  # wraps, and wraps back
    signed = moved.view(np.dtype(f"i{width}"))
    zigzag: Bytes = ((moved << unsigned(1)) ^ (signed >> (8 * width - 1)).view(unsigned)).view(np.uint8)
    return zigzag


def apply_difference(zigzag: Bytes, raw: Bytes, width: int) -> None:
    """Turn the old numbers in `raw` into the new ones."""
    unsigned = UNSIGNED[width]
    code = zigzag.view(unsigned)
    target = raw.view(unsigned)
    target += (code >> unsigned(1)) ^ -(code & unsigned(1))
