"""One direction of one node's connection: how wide and how long it is, by the traffic itself. Knows no codecs."""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 0.7  # how much of the old estimate is kept when a measurement comes
LEAST_NBYTES = 32 * 1024  # what is shorter travels in one burst and says little about the width
LEAST_S = 1e-6  # and nothing arrives in less, whatever a peer says


@dataclass(slots=True)
class Link:
    """Bandwidth as a payload sees it, and the delay of an empty message."""

    bytes_per_s: float
    delay_s: float = 0.0
    is_guess: bool = False  # from a probe, which bursts deceive: the first real payload knows better

    def observe(self, nbytes: int, seconds: float, busy_s: float) -> None:
        """`nbytes` arrived within `seconds`, while one of the ends was busy with something else for `busy_s`.

        If that may have been what took so long, the link is at least as wide as it looked.
        """
        if nbytes < LEAST_NBYTES or not 0 < seconds < math.inf:
            return
        rate = nbytes / max(seconds, LEAST_S)
        if busy_s < seconds / 2:
            memory = 0.0 if self.is_guess else MEMORY
            self.bytes_per_s = memory * self.bytes_per_s + (1 - memory) * rate
            self.is_guess = False
        elif rate > self.bytes_per_s:
            self.bytes_per_s = rate

    @property
    def words(self) -> str:
        mbit = self.bytes_per_s * 8 / 1e6
        return f"{mbit / 1000:.3g} Gbit/s" if mbit >= 1000 else f"{mbit:.3g} Mbit/s"
