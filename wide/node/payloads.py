"""What a node receives in parts and sends in parts: decoding as they come, encoding while others travel.

Knows codecs, where weights are kept, and a connection; knows nothing of leases.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Protocol

import torch

from wide.codec.encoders import Encoders
from wide.codec.feedback import Feedback
from wide.codec.ladder import LOSSLESS, RAW, codec_named
from wide.codec.layout import Flat, Layout
from wide.codec.lossless import Planes
from wide.codec.pieces import PIECE_NBYTES, cut, decode, encode, floats
from wide.codec.planes import Bytes
from wide.codec.speeds import measure
from wide.errors import ConnectionLost, ProtocolError
from wide.transport.connection import Connection
from wide.wire import messages as say

Unpacking = Generator[None, memoryview, None]


class Shelf(Protocol):
    """Where versions of the weights arrive, and stay."""

    layout: Layout
    weights: Flat

    def keep_versions(self) -> None: ...  # from now on in memory of their own, which nothing else changes


class Payloads:
    """The node's end of what is not sent raw. `codec_s` is the time that was spent on it, or waiting for it; `decode_s`
    is a part of that. What a lossy codec owes survives a connection.
    """

    def __init__(self, shelf: Shelf, encoders: Encoders) -> None:
        self._shelf, self._encoders = shelf, encoders
        self._live, self._all = cut(shelf.layout, only_live=True), cut(shelf.layout, only_live=False)
        self._feedback: Feedback | None = None
        self._role = ""
        self._paid = 0  # the lease whose update carried, as the last one, some of what was owed
        self.codec_s = self.decode_s = 0.0

    def unpack(self, message: say.Work | say.Weights, is_first: bool, batches: torch.Tensor | None) -> Unpacking:
        """Decodes what follows this message: `send` it each part as it comes; it returns after the last one.

        Weights go where versions arrive, the batches' bytes into `batches`.
        """
        if message.weights_codecs:
            yield from self._unpack_weights(message, is_first)
        if batches is not None and isinstance(message, say.Work) and message.batches_codec != RAW:
            yield from self._unpack_batches(message, batches.numpy())

    def _unpack_weights(self, work: say.Work | say.Weights, is_first: bool) -> Unpacking:
        if is_first and not work.is_whole:
            raise ProtocolError("out of order", "a difference to weights that this node never had")
        for codec in work.weights_codecs:
            for piece in self._all if is_first else self._live:
                data = yield
                started = time.perf_counter()
                decode(piece, codec, data, self._shelf.weights.raw, is_difference=not work.is_whole)
                self._decoded(started)

    def _unpack_batches(self, work: say.Work, target: Bytes) -> Unpacking:
        codec, offset = codec_named(work.batches_codec), 0
        if not isinstance(codec, Planes):
            raise ProtocolError("unknown codec", f"batches in {work.batches_codec}")
        for nbytes, width in work.runs:
            for start in range(0, nbytes, PIECE_NBYTES):
                end = min(start + PIECE_NBYTES, nbytes)
                data = yield
                started = time.perf_counter()
                codec.decode(data, target[offset + start : offset + end], width)
                self._decoded(started)
            offset += nbytes

    def _decoded(self, started: float) -> None:
        took_s = time.perf_counter() - started
        self.codec_s += took_s
        self.decode_s += took_s

    def refused(self, lease: int) -> None:
        """This lease's update did not count. If another one is on its way already, what it had paid is lost."""
        if self._paid == lease and self._feedback is not None:
            self._feedback.undo()
        self._paid = 0

    def speeds(self, names: tuple[str, ...], total: Flat) -> dict[str, tuple[float, float, float, float, float]]:
        """How the codecs do on this update."""
        started, first = time.perf_counter(), self._live[0]
        end = max(piece.end for piece in self._live if piece.dtype == first.dtype and piece.may_lose == first.may_lose)
        alike = total.raw[:end]
        speeds = measure(names, alike.numpy(), first.width, floats(alike.view(first.dtype)))
        self.codec_s += time.perf_counter() - started
        return {**speeds}

    def send(self, connection: Connection, update: say.Update, total: Flat, room: Flat | None = None) -> None:
        """The update as it is, or in parts; or it is left in the coordinator's memory, where there is room for it."""
        if update.codec == RAW:
            self._paid = 0
            if self._feedback is not None and self._feedback.is_owing:
                self._paid = update.lease
                self._feedback.pay(total.raw)
            if room is not None and room is not total:
                room.raw.copy_(total.raw)
            connection.send(update, *([total.bytes] if room is None else []))
            return
        if update.codec not in LOSSLESS and self._feedback is None:
            self._feedback = Feedback(self._live)
        self._paid = 0
        if self._feedback is not None:
            self._paid = update.lease
            self._feedback.begin()
        try:
            connection.send(update)
            self._send_parts(connection, update.codec, total)
        except ConnectionLost:
            self.refused(update.lease)  # of what was owed, a part is new and a part from two updates ago
            raise

    def use(self, role: str) -> None:
        """Updates are of this kind from now on. What was owed as a gradient is no debt among deltas."""
        if role != self._role:
            self._role, self._feedback, self._paid = role, None, 0

    def debt(self, flat: Flat) -> memoryview | None:
        """All that is owed, as a last payload; None if that is nothing."""
        if self._feedback is None or not self._feedback.is_owing:
            return None
        flat.raw.zero_()
        self._feedback.pay(flat.raw)
        return flat.bytes

    def close(self) -> None:
        self._encoders.close()

    def _send_parts(self, connection: Connection, codec: str, total: Flat) -> None:
        encode_piece = self._feedback.encode if self._feedback is not None else encode
        encoded = self._encoders.in_order(codec, lambda piece: encode_piece(piece, codec, total.raw), self._live)
        started = time.perf_counter()
        for data in encoded:
            self.codec_s += time.perf_counter() - started
            connection.send(say.Part(), *data)
            started = time.perf_counter()
