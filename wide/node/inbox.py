"""What a node is told: work as it comes in, piece by piece, until it can be begun. Knows messages and where their
payloads go; computes nothing.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

import torch

from wide.codec.ladder import RAW
from wide.errors import ProtocolError, WideError
from wide.node.beside import Beside
from wide.node.payloads import Payloads, Shelf, Unpacking
from wide.node.trainer import Place
from wide.strategy.catalogue import STRATEGIES
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.frames import Destinations, no_payload


class Stopped(WideError):
    """The coordinator has said goodbye."""

    def __init__(self, stop: say.Stop) -> None:
        super().__init__(stop.why)
        self.stop = stop


@dataclass(slots=True)
class Package:
    """Work, and its data as far as it has come: sample ids, or the batches' bytes."""

    work: say.Work
    since: float
    nbytes_before: int
    ids: bytearray = field(default_factory=bytearray)
    batches: torch.Tensor | None = None
    received_nbytes: int = 0
    received_s: float = 0.0
    distracted_s: float = 0.0  # the longest while in which nobody looked for more

    @property
    def places(self) -> list[Place]:
        """Of its batches."""
        sizes, epochs = iter(self.work.sizes), self.work.epochs or [0] * len(self.work.stretches)
        return [
            Place(step, batch, (size := next(sizes)), size / step_samples, epoch)
            for (step, first, count, step_samples), epoch in zip(self.work.stretches, epochs, strict=True)
            for batch in range(first, first + count)
        ]


class Inbox:
    """`ready` holds work that has come whole; `ahead`, such that may not be begun before the next weights are here.
    `has_new_weights`: a version is here that nobody has looked at.
    """

    def __init__(self, connection: Connection, shelf: Shelf, payloads: Payloads, beside: Beside | None = None) -> None:
        self._connection, self._shelf, self._payloads, self._beside = connection, shelf, payloads, beside
        self.ready: deque[Package] = deque()
        self.ahead: deque[Package] = deque()
        self.has_new_weights = False
        self._has_weights = False
        self._begun: deque[Package] = deque()  # their messages are not here yet
        self._weights_since = (0.0, 0)  # when the last weights began to come, and the bytes that had come by then
        self._parts: deque[bytearray] = deque()
        self._current: tuple[Package | say.Weights, Unpacking] | None = None
        self._looked_at = 0.0

    def hear(self, message: say.Message) -> None:
        if isinstance(message, say.Work):
            self._begin(self._begun.popleft())
        elif isinstance(message, say.Weights):
            self._begin_weights(message)
        elif isinstance(message, say.Part) and self._current is not None:
            self._go_on(memoryview(self._parts.popleft()))
        elif isinstance(message, say.Stop):
            raise Stopped(message)
        elif isinstance(message, say.Progress):
            log.info("%s", _told(message), extra={"is_status": True})
        elif not isinstance(message, say.Alive):
            raise ProtocolError("out of order", f"{type(message).__name__} is not for now")

    def look(self) -> None:
        """See what has come, in the middle of other work."""
        now = time.perf_counter()
        for package in [*self._begun, *([self._current[0]] if self._current else [])]:
            if isinstance(package, Package):
                package.distracted_s = max(package.distracted_s, now - self._looked_at)
        for message in self._connection.poll():
            self.hear(message)
        self._looked_at = time.perf_counter()

    def coming(self, messages: list[say.Message]) -> list[Package]:
        """Work that is among these, which have come and were not heard yet."""
        return list(islice(self._begun, sum(isinstance(message, say.Work) for message in messages)))

    def place_for(self, message: say.Message, nbytes: int) -> Destinations:
        """Weights go straight into the buffer for versions, data into memory made for this lease."""
        if isinstance(message, say.Part):
            self._parts.append(bytearray(nbytes))
            return (memoryview(self._parts[-1]),)
        if not isinstance(message, say.Work | say.Weights):
            return no_payload(message, nbytes)
        weights = self._shelf.weights.bytes[: message.weights_nbytes]
        if len(weights) != message.weights_nbytes or nbytes < len(weights):
            raise ProtocolError("wrong payload", f"{message.weights_nbytes} bytes of weights")
        if isinstance(message, say.Weights):
            self._weights_since = time.perf_counter(), self._connection.bytes_received
            return (weights,)
        package = Package(message, time.perf_counter(), self._connection.bytes_received)
        self._begun.append(package)
        data_nbytes = nbytes - len(weights)
        if message.batches is None:
            package.ids = bytearray(data_nbytes)
            return (weights, memoryview(package.ids))
        package.batches = torch.empty(sum(run[0] for run in message.runs), dtype=torch.uint8)
        is_raw = message.batches_codec == RAW
        if data_nbytes != (len(package.batches) if is_raw else 0):
            raise ProtocolError("wrong payload", f"{data_nbytes} bytes for {len(package.batches)} bytes of batches")
        return (weights, package.batches.numpy().data) if is_raw else (weights,)

    def _begin(self, package: Package) -> None:
        work = package.work
        if STRATEGIES[work.strategy].overlaps:
            self._shelf.keep_versions()
        self._take(work)
        if not (_brings_weights(work) or work.is_ahead):
            self.has_new_weights = self.has_new_weights or not self._has_weights
            self._has_weights = True  # those that this node has built are the pool's
        self._current = package, self._payloads.unpack(work, not self._has_weights, package.batches)
        self._go_on(None)

    def _begin_weights(self, weights: say.Weights) -> None:
        self._take(weights)
        self._current = weights, self._payloads.unpack(weights, not self._has_weights, None)
        self._go_on(None)

    def _take(self, message: say.Work | say.Weights) -> None:
        """What can be done before its parts have come."""
        if message.refused:
            self._payloads.refused(message.refused)
        if message.weights_codecs:
            self._shelf.keep_versions()
        if message.weights_at is not None and self._beside is not None:
            here = self._beside.weights(message.weights_at, only_live=self._has_weights)
            self._shelf.weights.raw[: len(here)].copy_(here)

    def _go_on(self, part: memoryview | None) -> None:
        assert self._current is not None
        current, unpacking = self._current
        try:
            next(unpacking) if part is None else unpacking.send(part)
        except StopIteration:
            self._current = None
            if isinstance(current, Package):
                self._is_whole(current)
            else:
                self._are_whole(current)

    def _is_whole(self, package: Package) -> None:
        package.received_nbytes = self._connection.bytes_received - package.nbytes_before
        package.received_s = time.perf_counter() - package.since
        if _brings_weights(package.work):
            self._has_weights = self.has_new_weights = True
        (self.ahead if package.work.is_ahead else self.ready).append(package)

    def _are_whole(self, weights: say.Weights) -> None:
        """What waited for them can be begun."""
        self._has_weights = self.has_new_weights = True
        since, nbytes_before = self._weights_since
        for package in self.ahead:
            package.received_nbytes = self._connection.bytes_received - nbytes_before
            package.received_s = time.perf_counter() - since
        self.ready.extend(self.ahead)
        self.ahead.clear()


def _brings_weights(message: say.Work | say.Weights) -> bool:
    return bool(message.weights_codecs or message.weights_nbytes) or message.weights_at is not None


def _told(progress: say.Progress) -> str:
    """`step 120/400 · this node: 512 of 2048 batches (25 %), 85 a second · 240 s left`"""
    of = f"/{progress.steps}" if progress.steps is not None else ""
    share = progress.yours / max(1, progress.batches)
    mine = f"this node: {progress.yours} of {progress.batches} batches ({share:.0%}), {progress.per_s:.3g} a second"
    left = f" · {progress.left_s:.0f} s left" if progress.left_s is not None else ""
    return f"step {progress.step}{of} · {mine}{left}"
