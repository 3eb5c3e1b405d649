"""What the run's owner asks for, carried out: pause, go on, save, stop, send a node away. Each wish is answered once.

Knows wishes and events. What they do to a pool is for the pool to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from wide.coordinator import events
from wide.coordinator.journal import Journal
from wide.coordinator.state import Pool
from wide.store.wishes import Wish, refusal

EVERY_S = 0.25


class Asked(Protocol):
    """Where wishes come from (store/wishes.py). `is_paused` outlives a pool that has to begin anew."""

    is_paused: bool

    def new(self) -> list[Wish]: ...
    def answer(self, wish: Wish, words: str) -> None: ...


class Steering:
    """`stop` ends the run as a signal would; `send_away` dismisses a node; None: there is none that could be."""

    def __init__(
        self,
        asked: Asked,
        pool: Pool,
        journal: Journal,
        post: Callable[[events.Event], None],
        stop: Callable[[], None],
        send_away: Callable[[int], None] | None = None,
    ) -> None:
        self._asked, self._pool, self._journal, self._post = asked, pool, journal, post
        self._stop, self._send_away = stop, send_away
        self._looked_at = -EVERY_S
        self._sent_away: set[int] = set()
        if asked.is_paused:
            post(events.PauseRequested())

    def look(self, now: float) -> None:
        """Often; does something a few times a second."""
        if now - self._looked_at < EVERY_S:
            return
        self._looked_at = now
        for wish in self._asked.new():
            words = self._carry_out(wish)
            self._journal.tell("asked", wish.node, f"{wish.what}: {words}")
            self._asked.answer(wish, words)

    def _carry_out(self, wish: Wish) -> str:
        match wish.what:
            case "pause":
                self._asked.is_paused = True
                self._post(events.PauseRequested())
                return "paused; what is out is still merged"
            case "resume":
                self._asked.is_paused = False
                self._post(events.ResumeRequested())
                return "the run goes on"
            case "checkpoint":
                self._post(events.CheckpointRequested())
                return "a checkpoint is saved, with the next version at the latest"
            case "stop":
                self._stop()
                return "the run stops, with a checkpoint"
            case "drop" if wish.node is not None:
                return self._drop(wish.node)
        return refusal("nobody here knows how to do that")

    def _drop(self, node: int) -> str:
        staying = self._pool.members.keys() - self._sent_away  # those are gone in a moment
        if node not in staying or self._send_away is None:
            return refusal(f"there is no node {node} in the pool, or it cannot leave")
        if len(staying) == 1 and not self._pool.is_open:
            return refusal(f"node {node} is the only one, and no other can come: stop the run instead")
        self._sent_away.add(node)
        self._send_away(node)
        return f"node {node} is sent away"
