"""Threads that share out work: torch gives Python's lock back while it computes, so they use as many cores. Knows
nothing of what is done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait


class Hands:
    """`count` of them, of which one is the caller's own. They begin when they are first used."""

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self._others = ThreadPoolExecutor(count - 1, thread_name_prefix="hand") if count > 1 else None

    def do(self, parts: Sequence[Callable[[], object]]) -> None:
        """All parts, at once. Should one raise, the others come to their end first: they write into the same memory."""
        if self._others is None or len(parts) == 1:
            for part in parts:
                part()
            return
        others = [self._others.submit(part) for part in parts[1:]]
        try:
            parts[0]()
        finally:
            wait(others)
        for other in others:
            other.result()

    def close(self) -> None:
        if self._others is not None:
            self._others.shutdown()


ONE = Hands()
