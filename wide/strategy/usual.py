"""What is usual: running medians over a bounded window, and how long an update usually is. Plain numbers; knows no
nodes and no tensors.

A median does not move for one who lies, however much, and moves along with what everybody does: within half a window.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque

WINDOW = 64


class Median:
    """Of the last 64 values."""

    __slots__ = ("_line", "_sorted", "value")

    def __init__(self) -> None:
        self.value = 0.0
        self._line: deque[float] = deque()
        self._sorted: list[float] = []

    def add(self, value: float) -> None:
        line, ordered = self._line, self._sorted
        if len(line) == WINDOW:
            del ordered[bisect_left(ordered, line.popleft())]
        line.append(value)
        insort(ordered, value)
        self.value = ordered[len(ordered) // 2]


class Lengths:
    """How long updates usually are. `amount`: what a gradient's batches weigh, or how many steps a delta is of. A
    gradient grows with its amount. A delta may, or only with the root of it, as who wanders about: it may be as long as
    either would make it.
    """

    __slots__ = ("_per_root", "count", "per_one", "wanders")

    def __init__(self, wanders: bool) -> None:
        self.wanders = wanders
        self.per_one, self._per_root = Median(), Median()
        self.count = 0  # that were added

    def add(self, norm: float, amount: float) -> None:
        self.count += 1
        self.per_one.add(norm / amount)
        if self.wanders:
            self._per_root.add(norm / math.sqrt(amount))

    def usual(self, amount: float) -> float:
        straight = self.per_one.value * amount
        return max(straight, self._per_root.value * math.sqrt(amount)) if self.wanders else straight
