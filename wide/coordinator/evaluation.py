"""The user's evaluate(), once an epoch, on a copy of the weights in a process of its own: never in training's way.

A global random generator or an eval() switch used there cannot reach the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from wide.codec.layout import Flat
from wide.coordinator.record import Record
from wide.errors import TrainingFailed
from wide.wire.messages import Evaluate, Evaluated

BACKLOG_NBYTES = 512 << 20

Send = Callable[..., None]


class Evaluation:
    """What waits for the evaluator. Without an evaluate() in the job nothing is ever asked."""

    def __init__(self, record: Record, is_wanted: bool) -> None:
        self._record = record
        self._is_wanted = is_wanted
        self._send: Send | None = None
        self._waiting: deque[tuple[Evaluate, memoryview]] = deque()
        self._asked: Evaluate | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self._waiting) or self._asked is not None

    @property
    def is_full(self) -> bool:
        return sum(len(weights) for _, weights in self._waiting) > BACKLOG_NBYTES

    def ask(self, epoch: int, step: int, weights: Flat) -> None:
        """Remember the weights as they are now; evaluate them when the evaluator has time."""
        if self._is_wanted:
            copy = weights.raw.clone().numpy().data
            self._waiting.append((Evaluate(epoch, step, len(copy)), copy))
            self._next()

    def hurry(self) -> None:
        """Time is up: of what waits, only the newest is still evaluated."""
        while len(self._waiting) > 1:
            self._waiting.popleft()

    def joined(self, send: Send) -> None:
        self._send = send
        self._next()

    def heard(self, evaluated: Evaluated) -> None:
        self._asked = None
        self._record.evaluated(evaluated.epoch, evaluated.step, evaluated.metrics)
        self._next()

    def lost(self, why: str) -> None:
        raise TrainingFailed(f"the evaluating process ended: {why}")

    def _next(self) -> None:
        if self._send is not None and self._asked is None and self._waiting:
            self._asked, weights = self._waiting.popleft()
            self._send(self._asked, weights)
