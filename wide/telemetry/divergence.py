"""Is training still going anywhere? Knows losses, one for each step.

A loss may begin low and rise honestly: a sum whose terms wake up one by one, a game of two networks. What never comes
back is one that has left every scale behind, and still doubles.
"""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS = 10  # one bad step, or three, may pass
TIMES = 1_000.0
GROWTH = 2.0  # from one ten of steps to the next


class Divergence:
    """`problem` says in one line that the loss has left its beginning far behind, in the wrong direction."""

    def __init__(self) -> None:
        self.problem = ""
        self._start: float | None = None
        self._last: deque[float] = deque(maxlen=3 * STEPS)

    def observe(self, loss: float) -> None:
        if self._start is None:
            self._start = loss
        self._last.append(loss)
        if loss < TIMES or len(self._last) < 3 * STEPS:
            return
        losses = list(self._last)
        first, then, now = (median(losses[i : i + STEPS]) for i in (0, STEPS, 2 * STEPS))
        if now > TIMES * max(1.0, self._start) and now > GROWTH * then > GROWTH * GROWTH * first:
            self.problem = (
                f"training diverges: the loss began at {self._start:.4g} and is {now:.4g} by now; "
                "lower the learning rate, set clip_norm, or warm up with a scheduler"
            )
