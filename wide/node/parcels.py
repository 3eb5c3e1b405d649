"""What a node receives in parts and sends in parts: decoding as they come, encoding while others travel.

Knows codecs, the trainer's buffers and a connection; knows nothing of leases.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch

from wide.codec.encoders import Encoders
from wide.codec.feedback import Feedback
from wide.codec.ladder import LOSSLESS, RAW, codec_named
from wide.codec.layout import Flat
from wide.codec.lossless import Planes
from wide.codec.pieces import PIECE_NBYTES, cut, decode, encode, floats
from wide.codec.speeds import measure
from wide.errors import ProtocolError, WideError
from wide.node.trainer import Trainer
from wide.transport.connection import Connection
from wide.wire import messages as say


class Interruption(WideError):
    """Instead of a part came another message: most likely the run is over."""

    def __init__(self, message: say.Message) -> None:
        super().__init__(f"{type(message).__name__} came instead of a part")
        self.message = message


class Parcels:
    """The node's end of what is not sent raw. `codec_s` is the time that was spent on it, or waiting for it."""

    def __init__(self, connection: Connection, trainer: Trainer, wait: Callable[[], say.Message]) -> None:
        self._connection, self._trainer, self._wait = connection, trainer, wait
        self._live, self._all = cut(trainer.layout, only_live=True), cut(trainer.layout, only_live=False)
        self._arrived: deque[bytearray] = deque()
        self._encoders = Encoders()
        self._feedback: Feedback | None = None
        self._has_paid = False  # the last update carried some of what was owed
        self.codec_s = 0.0

    def place_for(self, nbytes: int) -> memoryview:
        self._arrived.append(bytearray(nbytes))
        return memoryview(self._arrived[-1])

    def take_weights(self, work: say.Work, is_first: bool) -> None:
        """Bring the weights up to this work's version."""
        pieces = self._all if is_first else self._live
        if is_first and not work.is_whole:
            raise ProtocolError("out of order", "a difference to weights that this node never had")
        self._trainer.keep_versions()
        for codec in work.weights_codecs:
            for piece in pieces:
                data = self._next_part()
                started = time.perf_counter()
                decode(piece, codec, data, self._trainer.weights.raw, is_difference=not work.is_whole)
                self.codec_s += time.perf_counter() - started

    def take_batches(self, work: say.Work, raw: torch.Tensor) -> None:
        """Fill `raw` with the batches' bytes."""
        codec = codec_named(work.batches_codec)
        if not isinstance(codec, Planes):
            raise ProtocolError("unknown codec", f"batches in {work.batches_codec}")
        target, offset = raw.numpy(), 0
        for nbytes, width in work.runs:
            for start in range(0, nbytes, PIECE_NBYTES):
                end = min(start + PIECE_NBYTES, nbytes)
                codec.decode(self._next_part(), target[offset + start : offset + end], width)
            offset += nbytes

    def refused(self) -> None:
        """The last update did not count."""
        if self._has_paid and self._feedback is not None:
            self._feedback.undo()
        self._has_paid = False

    def speeds(self, names: tuple[str, ...], total: Flat) -> dict[str, tuple[float, float, float, float, float]]:
        """How the codecs do on this update."""
        started, first = time.perf_counter(), self._live[0]
        end = max(piece.end for piece in self._live if piece.dtype == first.dtype and piece.may_lose == first.may_lose)
        alike = total.raw[:end]
        speeds = measure(names, alike.numpy(), first.width, floats(alike.view(first.dtype)))
        self.codec_s += time.perf_counter() - started
        return {**speeds}

    def send(self, update: say.Update, total: Flat) -> None:
        """The update as it is, or in parts."""
        if update.codec == RAW:
            self._has_paid = self._feedback is not None and self._feedback.is_owing
            if self._has_paid and self._feedback is not None:
                self._feedback.pay(total.raw)
            self._connection.send(update, total.bytes)
            return
        if update.codec not in LOSSLESS and self._feedback is None:
            self._feedback = Feedback(self._live)
        self._has_paid = self._feedback is not None
        if self._feedback is not None:
            self._feedback.begin()
        self._connection.send(update)
        self._send_parts(update.codec, total)

    def debt(self, flat: Flat) -> memoryview | None:
        """All that is owed, as a last payload; None if that is nothing."""
        if self._feedback is None or not self._feedback.is_owing:
            return None
        flat.raw.zero_()
        self._feedback.pay(flat.raw)
        return flat.bytes

    def close(self) -> None:
        self._encoders.close()

    def _send_parts(self, codec: str, total: Flat) -> None:
        encode_piece = self._feedback.encode if self._feedback is not None else encode
        encoded = self._encoders.in_order(codec, lambda piece: encode_piece(piece, codec, total.raw), self._live)
        started = time.perf_counter()
        for data in encoded:
            self.codec_s += time.perf_counter() - started
            self._connection.send(say.Part(), *data)
            started = time.perf_counter()

    def _next_part(self) -> memoryview:
        message = self._wait()
        if not isinstance(message, say.Part):
            raise Interruption(message)
        return memoryview(self._arrived.popleft())
