"""Is an update finite? Large ones are looked through beside the loop, and told in the order in which they came."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait

import msgspec

from wide.codec.encoders import Encoders
from wide.codec.layout import Flat
from wide.codec.memory import LARGE_NBYTES
from wide.exchange import happenings as happened

NOT_FINITE = "the gradient, or what it changes in a buffer, is not finite: lower the learning rate or set clip_norm"


class Inspection:
    """`tell` is given what was looked through; `ring` wakes the loop up, which then calls `tell_done`."""

    def __init__(self, encoders: Encoders, ring: Callable[[], None], tell: Callable[[happened.Updated], None]) -> None:
        self._encoders, self._ring, self._tell = encoders, ring, tell
        self._begun: deque[tuple[happened.Updated, Future[bool]]] = deque()

    def believe(self, news: happened.Updated, is_finite: bool) -> None:
        self._tell(news if is_finite else msgspec.structs.replace(news, problem=NOT_FINITE))

    def look_through(self, news: happened.Updated, flat: Flat, nbytes: int) -> None:
        if nbytes < LARGE_NBYTES:
            self.believe(news, flat.is_finite())
            return
        future = self._encoders.submit(flat.is_finite)
        self._begun.append((news, future))
        future.add_done_callback(lambda _: self._ring())
        self.tell_done()

    def tell_done(self) -> None:
        while self._begun and self._begun[0][1].done():
            news, is_finite = self._begun.popleft()
            self.believe(news, is_finite.result())

    def finish(self, node: int) -> None:
        """What this node said last comes before its end."""
        if any(news.node == node for news, _ in self._begun):
            wait([future for _, future in self._begun])
            self.tell_done()
