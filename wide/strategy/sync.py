"""Synchronous training: how one step's batches are cut into leases. Knows blocks; knows nothing of nodes or time."""

from __future__ import annotations

import math

from wide.strategy.tree import Block, halves

TOLERANCE = 1.2


class OpenStep:
    """Which batches of a step are free, and which are still missing. A buddy allocator over the tree's blocks, counted
    from `start`.
    """

    def __init__(self, batches: int, start: int = 0) -> None:
        self.batches = batches
        self.missing = batches  # not merged yet
        self.free = batches  # not leased, or given back
        self._free = [Block(start, start + batches)]
        self._out: set[Block] = set()

    @property
    def is_complete(self) -> bool:
        return self.missing == 0

    def is_out(self, block: Block) -> bool:
        """Has this block been leased and not been merged yet?"""
        return block in self._out

    def cut(self, most: int) -> Block:
        """Take a free block of at most `most` batches; call only when some are `free`."""
        at = max(range(len(self._free)), key=lambda i: _worth(self._free[i].size, most)) if len(self._free) > 1 else 0
        block = self._free.pop(at)
        while block.size > most:
            block, rest = halves(block)
            self._free.insert(at, rest)
        self._out.add(block)
        self.free -= block.size
        return block

    def give_back(self, block: Block) -> None:
        """Nobody computes this block any more: it is free again."""
        self._out.remove(block)
        self.free += block.size
        self._free.append(block)
        self._free.sort()

    def keep_first(self, block: Block, batches: int) -> Block | None:
        """Only the first batches of a leased block will be answered: they are leased, the others free. Which they are;
        None, if these are no block of the tree.
        """
        kept, rest = block, []
        while kept.size > batches:
            kept, right = halves(kept)
            rest.append(right)
        if kept.size != batches:
            return None
        self._out.remove(block)
        self._out.update([kept, *rest])
        for piece in rest:
            self.give_back(piece)
        return kept

    def accept(self, block: Block) -> None:
        """The block's sum is in. Its first result counts; whoever else still computes it comes too late."""
        self._out.remove(block)
        self.missing -= block.size


def _worth(size: int, most: int) -> tuple[int, int]:
    """How much of a block could be leased; of two that give the same, the smaller one is left in fewer pieces."""
    return (size if size <= most else 1 << (most.bit_length() - 1)), -size


def lease_size(left: float, share: float, free: int, takers: int) -> int:
    """How many batches to lease: a node's share, by speed, of what is left. So leases shrink as a step ends.

    The tree has blocks of few sizes, so a lease is mostly smaller, and the next one makes up for it; but measured
    shares are noisy, so 3.5 batches count as 4. Never so many that another idle node would find nothing left.
    """
    return min(max(1, int(left * share * TOLERANCE)), math.ceil(free / takers))
