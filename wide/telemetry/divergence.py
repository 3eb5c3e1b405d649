"""Is training still going anywhere? Knows losses, one for each step."""

from __future__ import annotations

from collections import deque
from statistics import median

STEPS = 10  # one bad step, or three, may pass
TIMES = 10.0


class Divergence:
    """`problem` says in one line that the loss has left its beginning far behind, in the wrong direction."""

    def __init__(self) -> None:
        self.problem = ""
        self._start: float | None = None
        self._last: deque[float] = deque(maxlen=STEPS)

    def observe(self, loss: float) -> None:
        if self._start is None:
            self._start = loss
        self._last.append(loss)
        if len(self._last) == STEPS and 0 < TIMES * self._start < (now := median(self._last)):
            self.problem = (
                f"training diverges: the loss began at {self._start:.4g} and is {now:.4g} by now; "
                "lower the learning rate, set clip_norm, or warm up with a scheduler"
            )
