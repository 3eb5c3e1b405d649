"""From a coordinator to the process that started it: log lines, and pictures of the run, for whoever has the screen.

What is said here is for people: should the other side be stopped (Ctrl-Z, Ctrl-S), words wait, then the oldest are
lost, of pictures only the newest is kept, and training never waits for them.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import threading
from collections import deque
from multiprocessing.connection import Connection as Pipe

import msgspec

from wide.telemetry.snapshot import Snapshot, decoded, encoded

MOST_WAITING = 1000  # pieces of words
PIECE_CHARS = 600  # nodes that were forked write to the same pipe: so much is written in one go, whatever it is
LEAVE_S = 2.0
PATIENCE_S = 1.0

View = tuple[Snapshot, tuple[str, float]]


class Relay(io.TextIOBase):
    """A stderr that another process shows; `screen` is where it wants to have pictures, if it does. Once it was
    started, only a thread of its own may have to wait. A process that was forked from this one has no such thread: what
    the pipe does not take at once from it is lost.
    """

    encoding = "utf-8"

    def __init__(self, words: Pipe, screen: Pipe | None = None) -> None:
        self._words, self._screen, self._pid = words, screen, os.getpid()
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)
        self._view: View | None = None
        self._news, self._is_over = threading.Event(), False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Not before this process has forked its children."""
        self._thread = threading.Thread(target=self._work, name="relay", daemon=True)
        self._thread.start()

    def write(self, text: str) -> int:
        pieces = [text[i : i + PIECE_CHARS] for i in range(0, len(text), PIECE_CHARS)]
        if self._thread is None or os.getpid() != self._pid:
            for piece in pieces:
                if self._takes_more(PATIENCE_S if os.getpid() == self._pid else 0.0):
                    self._say(piece)
        else:
            self._waiting.extend(pieces)
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
        is_over = False
        while not is_over:
            self._news.wait()
            self._news.clear()
            is_over = self._is_over  # what was said before that is still sent
            while self._waiting:
                self._say(self._waiting.popleft())
            view, self._view = self._view, None
            if view is not None and self._screen is not None:
                with contextlib.suppress(OSError):
                    self._screen.send_bytes(msgspec.json.encode((msgspec.Raw(encoded(view[0])), view[1])))

    def _takes_more(self, timeout_s: float) -> bool:
        try:
            return bool(select.select([], [self._words], [], timeout_s)[1])
        except (OSError, ValueError, TypeError):
            return True  # where that cannot be asked (Windows), nobody is forked either

    def _say(self, piece: str) -> None:
        with contextlib.suppress(OSError):  # nobody listens any more
            self._words.send_bytes(piece.encode(errors="replace"))


def seen(said: bytes) -> View:
    """A picture, and what is being done."""
    run, phase = msgspec.json.decode(said, type=tuple[msgspec.Raw, tuple[str, float]])
    return decoded(bytes(run)), phase
