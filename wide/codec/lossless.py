"""Lossless codecs: byte planes, each compressed if that pays. Knows bytes; knows no dtypes and no network.

    length of each plane, u32 · the planes, one behind the other; one as long as it was before is not compressed

A decoder is told how much must come out. What would give more or less is refused before it is unpacked.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence

import lz4.block
import numpy as np

from wide.codec.planes import Bytes, put, split
from wide.errors import ProtocolError

try:
    from compression import zstd  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # before Python 3.14
    from backports import zstd

Buffers = Sequence[bytes | memoryview]

SAMPLE_NBYTES = 4096
WORTH_IT = 0.97  # of its length; what does not shrink to this is noise
_ZSTD_LEVEL = 1
_ZSTD_LIMITS = {zstd.DecompressionParameter.window_log_max: 20}  # a frame may not ask for more memory than 1 MB


class Planes:
    """Splits into planes and compresses them with `squeeze`; `expand(data, nbytes)` may not return more than nbytes."""

    is_lossless = True

    def __init__(
        self, name: str, squeeze: Callable[[memoryview], bytes], expand: Callable[[memoryview, int], bytes]
    ) -> None:
        self.name = name
        self._squeeze, self._expand = squeeze, expand

    def encode(self, raw: Bytes, width: int) -> Buffers:
        rows = [self._shorter(row) for row in split(raw, width)]
        return [struct.pack(f"<{width}I", *map(len, rows)), *rows]

    def decode(self, data: memoryview, raw: Bytes, width: int) -> None:
        """Fill `raw` with what was encoded."""
        head, plane_nbytes = 4 * width, len(raw) // width
        if len(data) < head:
            raise ProtocolError("bad encoding", f"{self.name}: {len(data)} bytes are too few for {width} planes")
        lengths = struct.unpack_from(f"<{width}I", data)
        if head + sum(lengths) != len(data) or max(lengths) > plane_nbytes:
            raise ProtocolError("bad encoding", f"{self.name}: planes of {lengths} bytes in {len(data)}")
        start = head
        for i, nbytes in enumerate(lengths):
            packed = data[start : start + nbytes]
            start += nbytes
            row = packed if nbytes == plane_nbytes else self._expanded(packed, plane_nbytes)
            put(np.frombuffer(row, np.uint8), i, width, raw)

    def _shorter(self, row: Bytes) -> bytes | memoryview:
        if len(row) > 4 * SAMPLE_NBYTES:
            quarter = len(row) // 4
            sample = np.concatenate([row[i * quarter : i * quarter + SAMPLE_NBYTES // 4] for i in range(4)])
            if len(self._squeeze(sample.data)) > WORTH_IT * len(sample):
                return row.data
        packed = self._squeeze(row.data)
        return packed if len(packed) < WORTH_IT * len(row) else row.data

    def _expanded(self, packed: memoryview, nbytes: int) -> bytes:
        try:
            row = self._expand(packed, nbytes)
        except Exception as error:  # each library has its own; whatever it says, these bytes are no plane
            raise ProtocolError("bad encoding", f"{self.name}: {error}") from None
        if len(row) != nbytes:
            raise ProtocolError("bad encoding", f"{self.name}: {len(row)} bytes came out, {nbytes} were expected")
        return row


class _Compressors(threading.local):
    """One for each thread: a new one for each plane takes its memory from the system, and threads queue for that."""

    def __init__(self) -> None:
        self.zstd = zstd.ZstdCompressor(_ZSTD_LEVEL)


_mine = _Compressors()


def _zstd_squeeze(row: memoryview) -> bytes:
    compressor = _mine.zstd
    compressor.set_pledged_input_size(len(row))
    packed: bytes = compressor.compress(row, zstd.ZstdCompressor.FLUSH_FRAME)
    return packed


def _zstd_expand(packed: memoryview, nbytes: int) -> bytes:
    row: bytes = zstd.ZstdDecompressor(options=_ZSTD_LIMITS).decompress(packed, max_length=nbytes)
    return row


LZ4 = Planes(
    "lz4",
    lambda row: lz4.block.compress(row, store_size=False),
    lambda packed, nbytes: lz4.block.decompress(packed, uncompressed_size=nbytes),
)
ZSTD = Planes("zstd", _zstd_squeeze, _zstd_expand)
