"""What workers should fetch, lease by lease: that of the one at hand first, then of those that are here already. Knows
packages and workers; no connection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from wide.node.inbox import Package
from wide.node.workers import Workers


class Ahead:
    """`contents`: what each batch of a package is made of, as `Samples.batch` is told it."""

    def __init__(self, workers: Workers, contents: Callable[[Package], list[tuple[Any, ...]]]) -> None:
        self._workers, self._contents = workers, contents
        self._sizes: dict[int, int] = {}  # of the leases that workers know of, in batches
        workers.forget()  # a pool that was joined anew gives other leases the same numbers

    def look(self, packages: Iterable[Package]) -> None:
        """Ask for what is new."""
        for package in packages:
            lease = package.work.lease
            if lease not in self._sizes and package.work.batches is None:
                contents = self._contents(package)
                self._sizes[lease] = len(contents)
                for i, content in enumerate(contents):
                    self._workers.ask((lease, i), *content)

    def take(self, lease: int, i: int, look: Callable[[], None]) -> Any:
        return self._workers.take((lease, i), look)

    def done(self, lease: int) -> None:
        """What was not taken of it is not wanted."""
        self._workers.forget((lease, i) for i in range(self._sizes.pop(lease, 0)))
