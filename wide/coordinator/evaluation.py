"""The user's evaluate(), once an epoch, on a copy of the weights in a process of its own: never in training's way.

A global random generator or an eval() switch used there cannot reach the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from wide.codec.layout import Flat

BACKLOG_NBYTES = 512 << 20

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

    def __init__(self, is_wanted: bool, send: Send) -> None:
        self._is_wanted, self._send = is_wanted, send
        self._waiting: deque[Asked] = deque()
        self._is_here = self._is_asked = False

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self._is_asked

    @property
    def is_full(self) -> bool:
        return sum(len(asked.weights) for asked in self._waiting) > BACKLOG_NBYTES

    def ask(self, epoch: int, step: int, weights: Flat) -> None:
        """Remember the weights as they are now; evaluate them when the evaluator has time."""
        if self._is_wanted:
            self._waiting.append(Asked(epoch, step, weights.raw.clone().numpy().data))
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
        self._is_asked = False
        self._next()

    def _next(self) -> None:
        if self._is_here and not self._is_asked and self._waiting:
            self._is_asked = True
            self._send(*self._waiting.popleft())
