"""The fixed binary tree over a step's batches, and sums over it. Knows integers; what is summed is the caller's.

    sum(first, end) = sum(first, mid) + sum(mid, end), mid = first + ⌈(end - first)/2⌉

A lease is any node of this tree. So whoever computes whichever block, in whatever order the blocks arrive, the same
additions are done on the same operands, and floating-point rounding cannot tell the difference. Halves, so that two
equal nodes get equal shares of any step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Generic, NamedTuple, TypeVar

Value = TypeVar("Value")


class Block(NamedTuple):
    """The batches first…end-1."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


def halves(block: Block) -> tuple[Block, Block]:
    mid = block.first + (block.end - block.first + 1) // 2
    return Block(block.first, mid), Block(mid, block.end)


@lru_cache(maxsize=65536)
def kin(block: Block, root: Block) -> tuple[Block, Block]:
    """(parent, sibling) of a block in the tree below `root`."""
    parent = root
    while True:
        left, right = halves(parent)
        if block in (left, right):
            return parent, right if block == left else left
        parent = left if block.first < left.end else right


class TreeSum(Generic[Value]):
    """Adds up what belongs to the blocks below `root`. `join(left, right)` may reuse and must return one of them."""

    def __init__(self, root: Block, join: Callable[[Value, Value], Value]) -> None:
        self.root = root
        self._join = join
        self._waiting: dict[Block, Value] = {}

    def add(self, block: Block, value: Value) -> None:
        while block != self.root:
            parent, sibling = kin(block, self.root)
            if sibling not in self._waiting:
                break
            other = self._waiting.pop(sibling)
            value = self._join(value, other) if block < sibling else self._join(other, value)
            block = parent
        self._waiting[block] = value

    def first(self) -> tuple[Block, Value]:
        """The first block that is whole, and its sum."""
        block = min(self._waiting)
        return block, self._waiting[block]

    def clear(self) -> list[Value]:
        """Forget what was added: the sums until then."""
        found = list(self._waiting.values())
        self._waiting.clear()
        return found

    def take(self) -> Value:
        """The sum over the whole root; only when everything has been added."""
        return self._waiting.pop(self.root)
