"""Batches that kill whoever computes them: a crash in native code, or no memory left. Pure: knows positions.

A process that ends without a word may have been killed by anybody. So what it was computing is tried again batch by
batch; and if another process ends there, with nothing else at hand, it is that batch. Of an open pool's nodes this is
told, and no more: machines come and go there, and whoever has the token could pretend to die.
"""

from __future__ import annotations

from wide.strategy.tree import Block

LIMIT = 2  # processes
OPEN_LIMIT = 5


class Deadly:
    """Who died where, until somebody gets through. `suspicion` is what there is to be told, in words."""

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open
        self._deaths: dict[int, int] = {}  # by position
        self.last_words = self.suspicion = ""

    @property
    def is_suspicious(self) -> bool:
        return bool(self._deaths)

    def died_at(self, block: Block, where: str) -> str:
        """A process ended while it computed this block. Why the run cannot go on, if so."""
        for position in range(block.first, block.end):
            self._deaths[position] = self._deaths.get(position, 0) + 1
        self.last_words = f"; the last one was computing {where}"
        count = self._deaths[block.first]
        if block.size > 1 or count < (OPEN_LIMIT if self._is_open else LIMIT):
            return ""
        self.suspicion = (
            f"{where}: {count} processes ended without a word while they computed this batch (a crash in native code, "
            "or no memory left): look at its samples, or lower batch_size"
        )
        return "" if self._is_open else self.suspicion

    def survived(self, block: Block) -> None:
        if self._deaths:
            for position in range(block.first, block.end):
                self._deaths.pop(position, None)
