"""Who failed at which batch: one machine may be broken, and where two of them fail it is the job. Whoever comes back
under another number is not another one. Pure: knows positions, nodes, and as whom they were let in.
"""

from __future__ import annotations

from wide.strategy.tree import Block


class Failures:
    """Since a step was closed."""

    def __init__(self) -> None:
        self._first: dict[int, tuple[str, int]] = {}  # position -> who failed there first, and its number

    def agree(self, position: int, who: str, node: int) -> bool:
        """This node failed there. Did another one, too? One alone, however often, is not believed."""
        return self._first.setdefault(position, (who, node))[0] != who

    def managed(self, block: Block, who: str) -> list[tuple[int, int]]:
        """It had no trouble there, so it was not the job: where others had, and which nodes."""
        faulty = [(at, it) for at, it in self._first.items() if block.first <= at < block.end and it[0] != who]
        for at, _ in faulty:
            del self._first[at]
        return [(at, node) for at, (_, node) in faulty]

    @property
    def are_any(self) -> bool:
        return bool(self._first)

    def step_closed(self) -> None:
        self._first.clear()
