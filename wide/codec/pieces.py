"""Flat buffers in pieces: one is compressed, or unpacked, while another is on its way. Knows codecs and layouts.

Both ends cut the same layout into the same pieces, so a piece is known by its place in the order and carries no name.
What may lose precision are trainable parameters; buffers (counters, running variances) always travel exactly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from wide.codec.ladder import codec_named
from wide.codec.layout import Layout, spans
from wide.codec.lossless import ZSTD, Buffers, Planes
from wide.codec.lossy import Floats, Lossy
from wide.codec.planes import Bytes, apply_difference, difference
from wide.errors import ProtocolError

MAY_LOSE = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}
PIECE_NBYTES = 256 * 1024  # a millisecond's work for most codecs; docs/findings.md
MOST_PART_NBYTES = PIECE_NBYTES + 128  # however a piece is encoded, it needs no more room


class Piece(NamedTuple):
    """Bytes start…end of a flat buffer, all of one dtype."""

    start: int
    end: int
    dtype: torch.dtype
    may_lose: bool

    @property
    def width(self) -> int:
        """Bytes in a number: a complex one is two."""
        return self.dtype.itemsize // (2 if self.dtype.is_complex else 1)

    def of(self, raw: torch.Tensor) -> torch.Tensor:
        return raw[self.start : self.end]


def cut(layout: Layout, only_live: bool) -> list[Piece]:
    """All of the layout, or all that changes, in pieces."""
    exact = [*layout.averaged, *layout.kept, *layout.left, *([] if only_live else layout.frozen + layout.constant)]
    runs = [(span, span[0] in MAY_LOSE) for span in spans(layout.trainable)] + [(span, False) for span in spans(exact)]
    return [
        Piece(start, min(start + PIECE_NBYTES, end), dtype, may_lose)
        for (dtype, first, end), may_lose in runs
        for start in range(first, end, PIECE_NBYTES)
    ]


def codec_for(piece: Piece, name: str) -> Planes | Lossy:
    """The codec that was asked for, or, where nothing may be lost, a lossless one."""
    codec = codec_named(name)
    return codec if piece.may_lose or isinstance(codec, Planes) else ZSTD


def encode(piece: Piece, name: str, raw: torch.Tensor, base: torch.Tensor | None = None) -> Buffers:
    """A piece of `raw`; with a base, which both ends have, what differs from it."""
    codec = codec_for(piece, name)
    if isinstance(codec, Planes):
        values = octets(piece, raw)
        if base is not None:
            values = difference(values, octets(piece, base), piece.width)
        return codec.encode(values, piece.width)
    return codec.encode(floats(piece.of(raw).view(piece.dtype)))


def decode(piece: Piece, name: str, data: memoryview, raw: torch.Tensor, is_difference: bool = False) -> None:
    """Write a piece back into `raw`; or, if it is a difference, add it there."""
    codec = codec_for(piece, name)
    values = octets(piece, raw)
    if isinstance(codec, Lossy):
        decoded = unpacked(codec, piece, data)
        view = piece.of(raw).view(piece.dtype)
        settle(view, decoded, is_difference)
    elif is_difference:
        moved = np.empty(len(values), np.uint8)
        codec.decode(data, moved, piece.width)
        apply_difference(moved, values, piece.width)
    else:
        codec.decode(data, values, piece.width)


def unpacked(codec: Lossy, piece: Piece, data: memoryview) -> Floats:
    out: Floats = np.empty((piece.end - piece.start) // piece.width, np.float32)
    codec.decode(data, out)
    return out


def settle(view: torch.Tensor, values: Floats, is_difference: bool) -> None:
    """view = values, or view += values: in fp32 or better, then rounded to the view's dtype, the same everywhere."""
    real = torch.view_as_real(view).reshape(-1) if view.dtype.is_complex else view
    moved = torch.from_numpy(values)
    real.copy_(real.to(torch.promote_types(real.dtype, torch.float32)) + moved if is_difference else moved)


def octets(piece: Piece, raw: torch.Tensor) -> Bytes:
    if piece.end > raw.numel():
        raise ProtocolError("wrong payload", f"bytes {piece.start}…{piece.end} of {raw.numel()}")
    return piece.of(raw).numpy()


def floats(view: torch.Tensor) -> Floats:
    """The numbers as fp32; of complex ones both parts. Copies only what is not fp32 yet."""
    real = torch.view_as_real(view).reshape(-1) if view.dtype.is_complex else view
    array: Floats = real.to(torch.float32).numpy()
    return array
