"""Which core a node computes on, where the machine is full. Knows the operating system's scheduler, nothing of work.

Two nodes on two cores, woken one after the other by a coordinator that is still running on one of them, were often put
on the other one together, and took turns there for 3 ms while the first was idle (docs/findings.md). So each is told
its place.
"""

from __future__ import annotations

import contextlib
import os

from wide.config import usable_cores


class Seat:
    """A core, by its place among those that this process may use; -1: any of them. Who computes with several threads
    takes none, and neither does a container that may use some of the machine's cores, but not which.
    """

    def __init__(self, threads: int) -> None:
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
        if threads > 1 or len(self._cores) != usable_cores():
            self._cores = []
        self._place = -1

    def take(self, place: int) -> None:
        if place != self._place and len(self._cores) > 1:
            self._place = place
            is_one = 0 <= place < len(self._cores)
            with contextlib.suppress(OSError):  # if cores were taken away meanwhile
                os.sched_setaffinity(0, {self._cores[place]} if is_one else self._cores)

    def leave(self) -> None:
        """Whoever asks for cores next finds all of them."""
        self.take(-1)
