"""The user's evaluate(), once an epoch, on a copy of the weights in a process of its own: never in training's way.

A global random generator or an eval() switch used there cannot reach the training. Should it raise, never end, or take
its process with it, training goes on without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wide.codec.layout import Flat

BACKLOG_NBYTES = 512 << 20
FIRST_LIMIT_S = 3600.0  # for an evaluation, while nothing is known of how long they take; then
TIMES, LEAST_LIMIT_S = 10.0, 60.0  # so many times the longest so far, and at least this

Send = Callable[[int, int, memoryview], None]  # epoch, step, weights


class Asked(NamedTuple):
    """The weights after a step, to be evaluated."""

    epoch: int
    step: int
    weights: memoryview


class Evaluation:
    """What waits for the evaluator, which is asked by `send` once it is there. If nobody is wanted to evaluate, nothing
    is ever asked.
    """

    def __init__(self, is_wanted: bool, send: Send, now: Callable[[], float]) -> None:
        self.is_wanted, self._send, self._now = is_wanted, send, now
        self._waiting: deque[Asked] = deque()
        self._is_here = False
        self._asked_at: float | None = None
        self.longest_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self._asked_at is not None

    @property
    def is_awaited(self) -> bool:
        """Should somebody evaluate who is not here yet?"""
        return self.is_wanted and not self._is_here

    @property
    def limit_s(self) -> float:
        """How long an evaluation may take, by what others took."""
        return max(LEAST_LIMIT_S, TIMES * self.longest_s) if self.longest_s else FIRST_LIMIT_S

    @property
    def is_late(self) -> bool:
        return self._asked_at is not None and self._now() - self._asked_at > self.limit_s

    @property
    def is_full(self) -> bool:
        return sum(len(asked.weights) for asked in self._waiting) > BACKLOG_NBYTES

    def copy(self, weights: Flat, live_nbytes: int) -> memoryview:
        """As they are now: what changes."""
        copy: memoryview = weights.raw[:live_nbytes].clone().numpy().data
        return copy

    def ask(self, epoch: int, step: int, weights: memoryview) -> None:
        """Remember these weights; evaluate them when the evaluator has time."""
        if self.is_wanted:
            self._waiting.append(Asked(epoch, step, weights))
            self._next()

    def hurry(self) -> None:
        """Time is up: of what waits, only the newest is still evaluated."""
        while len(self._waiting) > 1:
            self._waiting.popleft()

    def ready(self) -> None:
        """The evaluator is here."""
        self._is_here = True
        self._next()

    def answered(self) -> None:
        if self._asked_at is not None:
            self.longest_s = max(self.longest_s, self._now() - self._asked_at)
        self._asked_at = None
        self._next()

    def give_up(self) -> None:
        """There is no evaluator any more: nothing will be evaluated from now on."""
        self.is_wanted, self._asked_at = False, None
        self._waiting.clear()

    def _next(self) -> None:
        if self._is_here and self._asked_at is None and self._waiting:
            self._asked_at = self._now()
            self._send(*self._waiting.popleft())
