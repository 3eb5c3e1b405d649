"""What an update is like: is it finite, how large, and its digest. Large ones are looked through beside the loop, and
told in the order in which they came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

from wide.codec.digest import Digest
from wide.codec.encoders import Encoders
from wide.codec.layout import Flat
from wide.codec.memory import LARGE_NBYTES
from wide.exchange import happenings as happened
from wide.telemetry.journey import Journey

NOT_FINITE = "the gradient, or what it changes in a buffer, is not finite: lower the learning rate or set clip_norm"


class Unseen(NamedTuple):
    """An update as it came (happenings.Updated)."""

    node: int
    lease: int
    flat: Flat
    sizes: list[int]
    losses: list[float]
    journey: Journey


class Inspection:
    """`tell` is given what was looked through; `ring` wakes the loop up, which then calls `tell_done`."""

    def __init__(
        self, encoders: Encoders, ring: Callable[[], None], tell: Callable[[happened.Updated], None], digest: Digest
    ) -> None:
        self._encoders, self._ring, self._tell, self._digest = encoders, ring, tell, digest
        self._begun: deque[tuple[int, Future[happened.Updated]]] = deque()

    def look_through(self, update: Unseen, nbytes: int, norm: float | None = None) -> None:
        """`norm`: what its node says, which is believed because it could write there whatever it likes."""
        if nbytes < LARGE_NBYTES:
            self._tell(self._see(update, norm))
            return
        future = self._encoders.submit(self._see, update, norm)
        self._begun.append((update.node, future))
        future.add_done_callback(lambda _: self._ring())
        self.tell_done()

    def _see(self, update: Unseen, norm: float | None) -> happened.Updated:
        """The norm is not finite if anything in the update is not."""
        norm = update.flat.norm() if norm is None else norm
        problem, norm = ("", norm) if math.isfinite(norm) else (NOT_FINITE, 0.0)
        return happened.Updated(*update, problem, norm, self._digest.later(update.flat, update.losses))

    def tell_done(self) -> None:
        while self._begun and self._begun[0][1].done():
            self._tell(self._begun.popleft()[1].result())

    def finish(self, node: int) -> None:
        """What this node said last comes before its end."""
        if any(whose == node for whose, _ in self._begun):
            wait([future for _, future in self._begun])
            self.tell_done()
