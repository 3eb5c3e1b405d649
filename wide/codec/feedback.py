"""Error feedback: what a lossy codec left out of one update goes into the next. Knows pieces; knows no network.

    p = g + e      c = C(p)      e = p − D(c)        so that  Σ D(c) + e = Σ g

One per node, in fp32 (of fp64 gradients the last bits are lost, once). An update is a sum over samples, weighted by
1/N of its step, so e is in units of the merged gradient and counts the same whatever the next lease's size. It survives
a change of codec.
"""

from __future__ import annotations

import numpy as np
import torch

from wide.codec.lossless import Buffers
from wide.codec.lossy import Lossy
from wide.codec.pieces import Piece, codec_for, encode, floats, settle, unpacked


class Feedback:
    """What this node still owes the pool."""

    def __init__(self, pieces: list[Piece]) -> None:
        self._places: dict[Piece, slice] = {}
        count = 0
        for piece in pieces:
            if piece.may_lose:
                numbers = (piece.end - piece.start) // piece.width
                self._places[piece] = slice(count, count + numbers)
                count += numbers
        self._owed, self._before = np.zeros(count, np.float32), np.zeros(count, np.float32)

    @property
    def is_owing(self) -> bool:
        return bool(self._owed.any())

    def begin(self) -> None:
        """An update is about to be encoded. What was owed before it is remembered, in case it does not count."""
        self._owed, self._before = self._before, self._owed

    def undo(self) -> None:
        """The last update did not count: somebody else had sent the same batches. What it paid is owed again."""
        self._owed, self._before = self._before, self._owed

    def encode(self, piece: Piece, name: str, raw: torch.Tensor) -> Buffers:
        """One piece of the update and of what is owed; `raw` becomes what the other end will see.

        Pieces may be encoded in any order, by several threads.
        """
        codec = codec_for(piece, name)
        data = self._pay(piece, raw, codec if isinstance(codec, Lossy) else None)
        return data or encode(piece, name, raw)

    def pay(self, raw: torch.Tensor) -> None:
        """Add all that is owed to an update that will be sent as it is."""
        self.begin()
        for piece in self._places:
            self._pay(piece, raw, None)

    def _pay(self, piece: Piece, raw: torch.Tensor, codec: Lossy | None) -> Buffers:
        if piece not in self._places:
            return ()
        place, view = self._places[piece], piece.of(raw).view(piece.dtype)
        wanted = floats(view) + self._before[place]
        data = codec.encode(wanted) if codec is not None else ()
        sent = unpacked(codec, piece, memoryview(b"".join(data))) if codec is not None else wanted
        settle(view, sent, is_difference=False)
        np.subtract(wanted, floats(view), out=self._owed[place])
        return data
