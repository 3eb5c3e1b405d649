"""What an update is like: is it finite, how large, and its digest. Large ones are looked through beside the loop, and
told in the order in which they came.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import NamedTuple

import msgspec

from wide.codec.digest import Digest
from wide.codec.encoders import Encoders
from wide.codec.memory import LARGE_NBYTES
from wide.exchange import happenings as happened

NOT_FINITE = "the gradient, or what it changes in a buffer, is not finite: lower the learning rate or set clip_norm"


class Seen(NamedTuple):
    """`norm` is not finite if anything in the update is not."""

    norm: float
    digest: int


class Inspection:
    """`tell` is given what was looked through; `ring` wakes the loop up, which then calls `tell_done`."""

    def __init__(
        self, encoders: Encoders, ring: Callable[[], None], tell: Callable[[happened.Updated], None], digest: Digest
    ) -> None:
        self._encoders, self._ring, self._tell, self._digest = encoders, ring, tell, digest
        self._begun: deque[tuple[happened.Updated, Future[Seen]]] = deque()

    def look_through(self, news: happened.Updated, nbytes: int, norm: float | None = None) -> None:
        """`norm`: what its node says, which is believed because it could write there whatever it likes."""
        if nbytes < LARGE_NBYTES:
            self._told(news, self._see(news, norm))
            return
        future = self._encoders.submit(self._see, news, norm)
        self._begun.append((news, future))
        future.add_done_callback(lambda _: self._ring())
        self.tell_done()

    def _see(self, news: happened.Updated, norm: float | None) -> Seen:
        return Seen(news.flat.norm() if norm is None else norm, self._digest.of(news.flat, news.losses))

    def _told(self, news: happened.Updated, seen: Seen) -> None:
        problem = "" if math.isfinite(seen.norm) else NOT_FINITE
        norm = seen.norm if not problem else 0.0
        self._tell(msgspec.structs.replace(news, problem=problem, norm=norm, digest=seen.digest))

    def tell_done(self) -> None:
        while self._begun and self._begun[0][1].done():
            news, seen = self._begun.popleft()
            self._told(news, seen.result())

    def finish(self, node: int) -> None:
        """What this node said last comes before its end."""
        if any(news.node == node for news, _ in self._begun):
            wait([future for _, future in self._begun])
            self.tell_done()
