"""Buffers for updates that are used again and again, and given back to the system when fewer are needed. Knows layouts.

Making one takes longer than a small model's batch: memory, and a view for each tensor.
"""

from __future__ import annotations

import threading

import torch

from wide.codec.layout import Flat, Layout
from wide.codec.memory import Allocate

LEAST_KEPT = 2
SMALL_NBYTES = 256 << 10  # so much is always kept: an uneven step needs more buffers than there are nodes


class Spare:
    """One pool of buffers for everybody in this process who receives, computes or adds up updates."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu", allocate: Allocate | None = None) -> None:
        self._layout, self._device, self._allocate = layout, device, allocate
        self._free: list[Flat] = []
        self._lock = threading.Lock()  # updates are given back by the thread that adds them up
        self._least = max(LEAST_KEPT, SMALL_NBYTES // max(layout.live_nbytes, 4096))
        self._most_kept = self._least
        self.in_use = 0

    def take(self) -> Flat:
        """Room for one update; what is in it is of no interest."""
        with self._lock:
            self.in_use += 1
            flat = self._free.pop() if self._free else None
        if flat is None:
            memory = self._allocate(self._layout.live_nbytes) if self._allocate is not None else None
            return Flat(self._layout, only_live=True, device=self._device, memory=memory)
        flat.is_spare = False
        return flat

    def give(self, flat: Flat) -> None:
        """Nobody looks at it any more."""
        with self._lock:
            if flat.is_spare:
                raise RuntimeError("a buffer was given back twice")
            flat.is_spare = True
            self.in_use -= 1
            self._free.append(flat)
            self._let_go()

    def lose(self, flat: Flat) -> None:
        """Somebody who is gone may still write into it: nobody else will."""
        with self._lock:
            self.in_use -= 1
            flat.memory.close()

    def keep(self, most: int) -> None:
        """So many may be needed at once; what is more goes back to the system."""
        with self._lock:
            self._most_kept = max(self._least, most)
            self._let_go()

    def _let_go(self) -> None:
        while len(self._free) > self._most_kept:
            self._free.pop().memory.close()
