"""From a coordinator to the process that started it: log lines, and pictures of the run, for whoever has the screen.

What is said here is for people: should the other side be stopped (Ctrl-Z), words wait, then the oldest are lost, and
training never waits for them.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from multiprocessing.connection import Connection as Pipe

import msgspec

from wide.telemetry.snapshot import Snapshot, decoded, encoded

MOST_WAITING = 1000  # words


class Relay:
    """A stderr that another process shows. `post` is called by a thread of its own, which from then on is the only one
    that may have to wait.
    """

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._sending = threading.Lock()
        self._has_thread = False

    def write(self, text: str) -> int:
        self._waiting.append(text)
        if not self._has_thread:
            self._send()
        return len(text)

    def flush(self) -> None:
        """Every write is sent, now or soon."""

    def isatty(self) -> bool:
        return False

    def post(self, run: Snapshot, phase: tuple[str, float]) -> None:
        self._has_thread = True
        self._send((run, phase))

    def finish(self) -> None:
        """The thread is gone: what still waits is sent now."""
        self._has_thread = False
        self._send()

    def _send(self, view: tuple[Snapshot, tuple[str, float]] | None = None) -> None:
        with self._sending, contextlib.suppress(OSError):  # nobody listens any more
            while self._waiting:
                self._pipe.send_bytes(msgspec.json.encode(("log", self._waiting.popleft())))
            if view is not None:
                run, phase = view
                self._pipe.send_bytes(msgspec.json.encode(("view", msgspec.Raw(encoded(run)), phase)))


class _View(msgspec.Struct, array_like=True):
    kind: str
    body: msgspec.Raw
    phase: tuple[str, float] = ("", 0.0)


def heard(said: bytes) -> str | tuple[Snapshot, tuple[str, float]]:
    """A log line's text, or a picture and what is being done."""
    view = msgspec.json.decode(said, type=_View)
    if view.kind == "log":
        return msgspec.json.decode(view.body, type=str)
    return decoded(bytes(view.body)), view.phase
