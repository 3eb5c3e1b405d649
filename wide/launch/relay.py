"""From a coordinator to the process that started it: log lines, and pictures of the run, for whoever has the screen.

What is said here is for people: should the other side be stopped (Ctrl-Z, Ctrl-S), words wait, then the oldest are
lost, of pictures only the newest is kept, and training never waits for them.
"""

from __future__ import annotations

import contextlib
import io
import threading
from collections import deque
from multiprocessing.connection import Connection as Pipe

import msgspec

from wide.telemetry.snapshot import Snapshot, decoded, encoded

MOST_WAITING = 1000  # words
LEAVE_S = 2.0

View = tuple[Snapshot, tuple[str, float]]


class Relay(io.TextIOBase):
    """A stderr that another process shows. Once it was started, only a thread of its own may have to wait."""

    encoding = "utf-8"

    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._view: View | None = None
        self._news, self._is_over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Not before this process has forked its children."""
        self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        self._waiting.append(text)
        if self._thread is None:
            self._send()
        self._news.set()
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """For whoever needs a file, and not a stream (faulthandler, subprocess)."""
        return 2

    def post(self, run: Snapshot, phase: tuple[str, float]) -> None:
        self._view = run, phase
        self._news.set()

    def finish(self) -> None:
        """What still waits is sent; unless nobody takes it."""
        self._is_over = True
        self._news.set()
        if self._thread is not None:
            self._thread.join(LEAVE_S)

    def _work(self) -> None:
        while not self._is_over:
            self._news.wait()
            self._news.clear()
            self._send()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            while self._waiting:
                self._pipe.send_bytes(msgspec.json.encode(("log", self._waiting.popleft())))
            view, self._view = self._view, None
            if view is not None:
                self._pipe.send_bytes(msgspec.json.encode(("view", msgspec.Raw(encoded(view[0])), view[1])))


class _Said(msgspec.Struct, array_like=True):
    kind: str
    body: msgspec.Raw
    phase: tuple[str, float] = ("", 0.0)


def heard(said: bytes) -> str | View:
    """A log line's text, or a picture and what is being done."""
    it = msgspec.json.decode(said, type=_Said)
    if it.kind == "log":
        return msgspec.json.decode(it.body, type=str)
    return decoded(bytes(it.body)), it.phase
