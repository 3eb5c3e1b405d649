"""The user's loop and the session that serves it take turns: each runs in a thread of its own, never both at once. So
the loop need not be turned round, and the session reads as for any other node.
"""

from __future__ import annotations

import queue
from typing import Any, NamedTuple

from wide.errors import Left

LOOK_S = 0.5  # so often a loop that waits can be interrupted, on every system


class Over(Exception):
    """There is no more for the loop: the run is over, or `error` says why not."""

    def __init__(self, why: str, error: BaseException | None = None) -> None:
        super().__init__(why)
        self.error = error


class _Gone(NamedTuple):
    why: str


class Turns:
    """Whoever has the turn runs; the other one waits for what it will be given."""

    def __init__(self) -> None:
        self._to_loop: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._to_session: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._gone_why = ""

    # ── the session's side ───────────────────────────────────────────────────────────────────────────────────────

    def ask(self, what: Any) -> Any:
        """What the loop says to that, when it has the turn again. Raises Left, if there is no loop any more."""
        if self._gone_why:
            raise Left(self._gone_why)
        self._to_loop.put(what)
        answer = self._to_session.get()
        if isinstance(answer, _Gone):
            raise Left(answer.why)
        return answer

    def end(self, over: Over) -> None:
        """The loop will hear this whenever it asks."""
        self._to_loop.put(over)

    # ── the loop's side ──────────────────────────────────────────────────────────────────────────────────────────

    def take(self) -> Any:
        """What the session asks next. Raises Over."""
        while True:
            try:
                found = self._to_loop.get(timeout=LOOK_S)
            except queue.Empty:
                continue
            if isinstance(found, Over):
                self._to_loop.put(found)
                raise found
            return found

    @property
    def is_left(self) -> bool:
        return bool(self._gone_why)

    def give(self, answer: Any) -> None:
        self._to_session.put(answer)

    def leave(self, why: str) -> None:
        """Whoever has the turn: the loop will not be there again."""
        self._gone_why = why
        self._to_session.put(_Gone(why))
