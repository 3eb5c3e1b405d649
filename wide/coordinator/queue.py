"""One queue: events go to the pool in their order, and what it decides is carried out before the next one is looked at.

Whoever carries an action out may post what came of it. Nobody ever calls back into the pool. An action that takes long
is carried out beside the loop (aside.py); until then everything else waits, but for the time at which it happened.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any

from wide.coordinator.aside import Pending
from wide.coordinator.events import ACTIONS, Action, Event
from wide.coordinator.state import Pool

Perform = Callable[[Any], Pending | None]


class EventQueue:
    """`performers` say who carries out which action."""

    def __init__(self, pool: Pool, performers: Mapping[type[Action], Perform], now: Callable[[], float]) -> None:
        assert set(performers) == set(ACTIONS)
        self._pool, self._performers, self._now = pool, performers, now
        self._events: deque[tuple[Event | Callable[[], None], float]] = deque()
        self._actions: deque[Action] = deque()
        self._pending: Pending | None = None

    def post(self, event: Event | Callable[[], None]) -> None:
        """It happened; what follows from it is done by the next `work_off`. Or this is to be called in its turn."""
        self._events.append((event, self._now()))

    @property
    def is_waiting(self) -> bool:
        """For something that is done aside."""
        return self._pending is not None

    def work_off(self) -> None:
        try:
            while self._pending is None or self._has_settled():
                if self._actions:
                    action = self._actions.popleft()
                    self._pending = self._performers[type(action)](action)
                elif self._events:
                    event, at = self._events.popleft()
                    if isinstance(event, Event):
                        self._actions.extend(self._pool.handle(event, at))
                    else:
                        event()
                else:
                    return
        except BaseException:
            self._actions.clear()  # what was decided together with what has failed
            raise

    def finish(self) -> None:
        """Something broke elsewhere. What has happened since is of no interest any more; but what was decided is
        carried out to its end, for the pool believes that it was.
        """
        self._events.clear()
        self.wait()
        self._events.clear()

    def wait(self) -> None:
        """Until all is carried out, also what is done aside."""
        self.work_off()
        while self._pending is not None:
            futures.wait([self._pending.work])
            self.work_off()

    def _has_settled(self) -> bool:
        """Is it done? Raises what went wrong with it."""
        assert self._pending is not None
        if not self._pending.work.done():
            return False
        pending, self._pending = self._pending, None
        pending.work.result()
        for follow in pending.then:
            follow()
        return True
