"""What takes long with a large model is done beside the loop: sums, the optimizer's step, copies. Meanwhile heartbeats
and strangers are served; decisions wait (queue.py). Knows one thread; what is done there is the callers'.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from wide.codec.memory import LARGE_NBYTES


class Pending(NamedTuple):
    """Something that is being done, and what follows in the loop once it is."""

    work: Future[Any]
    then: list[Callable[[], None]]


class Aside:
    """One thread, one thing at a time. A small model has none: handing over would take longer than the work."""

    def __init__(self, nbytes: int = 0, ring: Callable[[], None] = lambda: None) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="aside") if nbytes >= LARGE_NBYTES else None
        self._ring = ring

    @property
    def is_used(self) -> bool:
        return self._thread is not None

    def do(self, work: Callable[[], Any], *then: Callable[[], None]) -> Pending | None:
        """None: all is done."""
        if self._thread is None:
            work()
            for follow in then:
                follow()
            return None
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self._ring())
        return Pending(future, list(then))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()


def afterwards(pending: Pending | None, *then: Callable[[], None]) -> Pending | None:
    """The same, and then this."""
    if pending is not None:
        pending.then.extend(then)
    else:
        for follow in then:
            follow()
    return pending
