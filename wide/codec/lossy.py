"""Lossy codecs: fewer bits for each number, by blocks. Knows fp32 arrays; who adds back what was lost is feedback.py.

Every decoder checks the length first: it follows from the number of values alone, so nothing can be too large.
"""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from wide.codec.lossless import Buffers
from wide.errors import ProtocolError

Floats = npt.NDArray[np.float32]
INT8_BLOCK = 2048
INT4_BLOCK = 128
CHUNK = 4096  # 12 bits name a place in it
KEPT = 64  # of each chunk: SparseLoCo's density
CHUNK_NBYTES = 4 + KEPT // 4 + KEPT * 12 // 8


class Lossy(abc.ABC):
    """A codec whose encoding has a fixed length."""

    name: str
    is_lossless = False

    def encode(self, values: Floats) -> Buffers:
        """`values` may be anything finite; what is not finite comes back as not finite, and is refused there."""
        with np.errstate(all="ignore"):
            return self._encode(values)

    def decode(self, data: memoryview, out: Floats) -> None:
        if len(data) != self.nbytes(len(out)):
            expected = self.nbytes(len(out))
            raise ProtocolError("bad encoding", f"{self.name}: {len(data)} bytes for {len(out)} values, not {expected}")
        with np.errstate(all="ignore"):
            self._decode(data, out)

    @abc.abstractmethod
    def nbytes(self, count: int) -> int: ...
    @abc.abstractmethod
    def _encode(self, values: Floats) -> Buffers: ...
    @abc.abstractmethod
    def _decode(self, data: memoryview, out: Floats) -> None: ...


class Bf16(Lossy):
    """The upper half of each number, rounded to nearest."""

    name = "bf16"

    def nbytes(self, count: int) -> int:
        return 2 * count

    def _encode(self, values: Floats) -> Buffers:
        return [torch.from_numpy(values).to(torch.bfloat16).view(torch.uint8).numpy().data]

    def _decode(self, data: memoryview, out: Floats) -> None:
        halves = torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(torch.bfloat16)
        torch.from_numpy(out).copy_(halves)


class Int8(Lossy):
    """A scale for each block of 2048, then one byte a number."""

    name = "int8"

    def nbytes(self, count: int) -> int:
        return 4 * _blocks(count, INT8_BLOCK) + count

    def _encode(self, values: Floats) -> Buffers:
        blocks = _padded(values, INT8_BLOCK)
        scales, steps = _scales(blocks, 127)
        whole = np.rint(blocks * steps).astype(np.int8)
        return [scales.data.cast("B"), whole.reshape(-1)[: len(values)].data.cast("B")]

    def _decode(self, data: memoryview, out: Floats) -> None:
        count = _blocks(len(out), INT8_BLOCK)
        scales = np.frombuffer(data, "<f4", count)
        whole = np.frombuffer(data, np.int8, offset=4 * count)
        out[:] = whole
        full = len(out) // INT8_BLOCK
        body, tail = out[: full * INT8_BLOCK], out[full * INT8_BLOCK :]
        np.multiply(body.reshape(-1, INT8_BLOCK), scales[:full, None], out=body.reshape(-1, INT8_BLOCK))
        if len(tail):
            tail *= scales[full]


class Int4(Lossy):
    """A scale for each block of 128, then half a byte a number: first halves of the blocks below, second above."""

    name = "int4"

    def nbytes(self, count: int) -> int:
        return _blocks(count, INT4_BLOCK) * (4 + INT4_BLOCK // 2)

    def _encode(self, values: Floats) -> Buffers:
        scales, steps = _scales(blocks := _padded(values, INT4_BLOCK), 7)
        shifted = blocks * steps
        shifted += np.float32(8.5)  # 1…15, and astype rounds down
        whole = shifted.astype(np.uint8)
        half = INT4_BLOCK // 2
        pairs = whole[:, :half] | whole[:, half:] << 4
        return [scales.data.cast("B"), pairs.reshape(-1).data]

    def _decode(self, data: memoryview, out: Floats) -> None:
        count, half = _blocks(len(out), INT4_BLOCK), INT4_BLOCK // 2
        scales = np.frombuffer(data, "<f4", count)
        pairs = np.frombuffer(data, np.uint8, offset=4 * count).reshape(count, half)
        blocks = np.empty((count, INT4_BLOCK), np.float32)
        blocks[:, :half] = pairs & 15
        blocks[:, half:] = pairs >> 4
        blocks -= np.float32(8)
        blocks *= scales[:, None]
        out[:] = blocks.reshape(-1)[: len(out)]


class TopK(Lossy):
    """Of each chunk of 4096 the 64 largest: two bits for each value (sign; which of the chunk's two levels), 12 for its
    place. What is not sent waits in the error feedback.
    """

    name = "topk"

    def nbytes(self, count: int) -> int:
        return _blocks(count, CHUNK) * CHUNK_NBYTES

    def _encode(self, values: Floats) -> Buffers:
        chunks = _padded(values, CHUNK)
        bits = chunks.view(np.int32) & 0x7FFFFFFF  # as integers, magnitudes keep their order, and sort quicker
        places = np.argpartition(bits, CHUNK - KEPT, axis=1)[:, -KEPT:]
        kept = np.take_along_axis(chunks, places, axis=1)  # (chunks, KEPT)
        sizes = np.abs(kept)
        is_high = sizes > sizes.mean(axis=1, keepdims=True)
        highs = is_high.sum(axis=1)
        low = np.where(is_high, 0, sizes).sum(axis=1) / (KEPT - highs)
        high = np.where(is_high, sizes, 0).sum(axis=1) / np.maximum(highs, 1)
        levels = torch.from_numpy(np.stack([low, high], axis=1).astype(np.float32)).to(torch.bfloat16)
        rows = np.empty((len(chunks), CHUNK_NBYTES), np.uint8)
        rows[:, :4] = levels.view(torch.uint8).numpy()
        rows[:, 4 : 4 + KEPT // 4] = _pack_twos((kept < 0).astype(np.uint8) | is_high.astype(np.uint8) << 1)
        rows[:, 4 + KEPT // 4 :] = _pack_twelves(places.astype(np.uint16))
        return [rows.reshape(-1).data]

    def _decode(self, data: memoryview, out: Floats) -> None:
        rows = np.frombuffer(data, np.uint8).reshape(-1, CHUNK_NBYTES)
        levels = torch.from_numpy(rows[:, :4].copy()).view(torch.bfloat16).float().numpy()  # (chunks, 2)
        twos = _unpack_twos(rows[:, 4 : 4 + KEPT // 4])
        kept = np.take_along_axis(levels, (twos >> 1).astype(np.intp), axis=1)
        kept = np.where(twos & 1, -kept, kept)
        chunks = np.zeros((len(rows), CHUNK), np.float32)
        np.put_along_axis(chunks, _unpack_twelves(rows[:, 4 + KEPT // 4 :]), kept, axis=1)
        out[:] = chunks.reshape(-1)[: len(out)]


def _blocks(count: int, block: int) -> int:
    return -(-count // block)


def _padded(values: Floats, block: int) -> Floats:
    """(count,) -> (blocks, block), the last one filled up with zeros; a view if nothing is missing."""
    missing = -len(values) % block
    return (np.concatenate([values, np.zeros(missing, np.float32)]) if missing else values).reshape(-1, block)


def _scales(blocks: Floats, most: int) -> tuple[Floats, Floats]:
    """For each block the value of one unit, and its inverse as a column; zero where all is zero."""
    largest = np.maximum(blocks.max(axis=1), -blocks.min(axis=1))
    scales = largest / np.float32(most)
    steps = np.where(scales > 0, 1 / scales, np.float32(0)).astype(np.float32)
    steps[np.isinf(steps)] = 0  # denormal: stays in the error feedback
    return scales.astype("<f4"), steps[:, None]


def _pack_twos(codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    packed: npt.NDArray[Any] = codes[:, 0::4] | codes[:, 1::4] << 2 | codes[:, 2::4] << 4 | codes[:, 3::4] << 6
    return packed


def _unpack_twos(packed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return np.stack([packed >> shift & 3 for shift in (0, 2, 4, 6)], axis=2).reshape(len(packed), -1)


def _pack_twelves(places: npt.NDArray[Any]) -> npt.NDArray[Any]:
    even, odd = places[:, 0::2], places[:, 1::2]
    triples = np.stack([even & 255, even >> 8 | (odd & 15) << 4, odd >> 4], axis=2)
    return triples.astype(np.uint8).reshape(len(places), -1)


def _unpack_twelves(packed: npt.NDArray[Any]) -> npt.NDArray[Any]:
    triples = packed.reshape(len(packed), -1, 3).astype(np.intp)
    even = triples[:, :, 0] | (triples[:, :, 1] & 15) << 8
    odd = triples[:, :, 1] >> 4 | triples[:, :, 2] << 4
    return np.stack([even, odd], axis=2).reshape(len(packed), -1)
