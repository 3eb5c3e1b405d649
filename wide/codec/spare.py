"""Buffers for updates that are used again and again, and given back to the system when fewer are needed. Knows layouts.

Making one takes longer than a small model's batch: memory, and a view for each tensor.
"""

from __future__ import annotations

import torch

from wide.codec.layout import Flat, Layout

LEAST_KEPT = 2


class Spare:
    """One pool of buffers for everybody in this process who receives, computes or adds up updates."""

    def __init__(self, layout: Layout, device: torch.device | str = "cpu") -> None:
        self._layout, self._device = layout, device
        self._free: list[Flat] = []
        self._most_kept = LEAST_KEPT
        self.in_use = 0

    def take(self) -> Flat:
        """Room for one update; what is in it is of no interest."""
        self.in_use += 1
        if not self._free:
            return Flat(self._layout, only_live=True, device=self._device)
        flat = self._free.pop()
        flat.is_spare = False
        return flat

    def give(self, flat: Flat) -> None:
        """Nobody looks at it any more."""
        if flat.is_spare:
            raise RuntimeError("a buffer was given back twice")
        flat.is_spare = True
        self.in_use -= 1
        if len(self._free) < self._most_kept:
            self._free.append(flat)

    def keep(self, most: int) -> None:
        """So many may be needed at once; what is more goes back to the system."""
        self._most_kept = max(LEAST_KEPT, most)
        del self._free[self._most_kept :]
