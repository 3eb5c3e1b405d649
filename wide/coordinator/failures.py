"""Who failed at which batch: one machine may be broken, and where two of them fail it is the job. Pure: knows positions
and nodes.
"""

from __future__ import annotations

from wide.strategy.tree import Block


class Failures:
    """Since a step was closed."""

    def __init__(self) -> None:
        self._first: dict[int, int] = {}  # position -> the first node that failed there

    def agree(self, position: int, node: int) -> bool:
        """This node failed there. Did another one, too? One alone, however often, is not believed."""
        return self._first.setdefault(position, node) != node

    def managed(self, block: Block, node: int) -> list[tuple[int, int]]:
        """It had no trouble there, so it was not the job: where others had, and who."""
        faulty = [(at, who) for at, who in self._first.items() if block.first <= at < block.end and who != node]
        for at, _ in faulty:
            del self._first[at]
        return faulty

    @property
    def are_any(self) -> bool:
        return bool(self._first)

    def step_closed(self) -> None:
        self._first.clear()
