"""One queue: events go to the pool in their order, and what it decides is carried out before the next one is looked at.

Whoever carries an action out may post what came of it. Nobody ever calls back into the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from wide.coordinator.events import ACTIONS, Action, Event
from wide.coordinator.state import Pool


class EventQueue:
    """`performers` say who carries out which action."""

    def __init__(
        self, pool: Pool, performers: Mapping[type[Action], Callable[[Any], None]], now: Callable[[], float]
    ) -> None:
        assert set(performers) == set(ACTIONS)
        self._pool, self._performers, self._now = pool, performers, now
        self._events: deque[Event] = deque()

    def post(self, event: Event) -> None:
        """It happened; what follows from it is done by the next `work_off`."""
        self._events.append(event)

    def work_off(self) -> None:
        while self._events:
            for action in self._pool.handle(self._events.popleft(), self._now()):
                self._performers[type(action)](action)

    def clear(self) -> None:
        """Something broke: what was to come is of no interest any more."""
        self._events.clear()
