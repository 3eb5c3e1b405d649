"""How a run is shown while it trains: a screen that lives (in a terminal), one that is drawn anew (in a notebook), or a
line now and then (in a pipe, in a log file). A thread, or the process that waits for the run, reads snapshots; nobody
who trains waits for it, and a terminal that is gone ends nothing.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol, Self

from wide.dashboard.progress import line
from wide.telemetry.log import log
from wide.telemetry.snapshot import Snapshot, Window

REFRESH_S = 1.0  # where another process draws
OWN_REFRESH_S = 1.0  # where it is the one that trains
LEAVE_S = 2.0
MOST_REST = 10_000  # characters of a line without an end
PIPED_S = 30.0
FIRST_S = 5.0  # whatever is shown seldom is shown after this for the first time

Phase = tuple[str, float]
Post = Callable[[Snapshot, Phase], None]


class Display(Protocol):
    """Something that shows snapshots, and log lines above them. Leaving it takes it off the screen."""

    def __enter__(self) -> Self: ...
    def __exit__(self, *_: object) -> None: ...
    def show(self, run: Snapshot, phase: Phase) -> None: ...
    def write(self, text: str) -> int: ...
    def flush(self) -> None: ...


class Screen:
    """A terminal, whatever becomes of its size."""

    def __init__(self, stream: Any = None, is_whole: bool = False) -> None:
        from rich.console import Console
        from rich.live import Live

        self.console = Console(file=stream or sys.stderr, highlight=False)
        self._live = Live(console=self.console, auto_refresh=False, transient=not is_whole, screen=is_whole)
        self._lock = threading.Lock()
        self._rest = ""  # of a line that has not ended

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # it was closed
            self._live.stop()

    def show(self, run: Snapshot, phase: Phase) -> None:
        from wide.dashboard.screen import screen

        size = self.console.size
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._live.update(screen(run, phase, time.monotonic(), size.width, size.height), refresh=True)

    def write(self, text: str) -> int:
        """Lines that stay, above the screen that lives. Part of a line waits for the rest of it."""
        from rich.text import Text

        with self._lock, contextlib.suppress(OSError, ValueError):
            whole, newline, self._rest = f"{self._rest}{text}".rpartition("\n")
            self._rest = self._rest.rpartition("\r")[2][-MOST_REST:]  # what is written over was not meant to stay
            if newline:
                self.console.print(Text.from_ansi(whole), soft_wrap=True)
        return len(text)

    def flush(self) -> None:
        """Every write is shown at once."""


class Lines:
    """A line now and then, in the log."""

    def __enter__(self) -> Self:
        self._due = time.monotonic() + FIRST_S
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, run: Snapshot, phase: Phase) -> None:
        if (now := time.monotonic()) >= self._due:
            self._due = now + PIPED_S
            log.info("%s", line(run, phase, now))

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def has_screen(stream: Any, is_plain: bool) -> bool:
    """Is there a terminal that can do more than print?"""
    return not is_plain and stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


@contextlib.contextmanager
def watching(window: Window, is_wanted: bool, is_plain: bool, post: Post | None = None) -> Iterator[None]:
    """Show the run while the block runs; or, if somebody else does that, `post` it to them."""
    if not is_wanted:
        yield
        return
    if post is not None:
        with _every(REFRESH_S, lambda: post(window.latest, window.phase)):
            yield
        return
    display: Display = Screen() if has_screen(sys.stderr, is_plain) else Lines()
    with display, _logging_to(display), _every(OWN_REFRESH_S, lambda: display.show(window.latest, window.phase)):
        yield


@contextlib.contextmanager
def _every(seconds: float, deed: Callable[[], None]) -> Iterator[None]:
    stop = threading.Event()

    def keep_on() -> None:
        while not stop.wait(seconds):
            deed()

    thread = threading.Thread(target=keep_on, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LEAVE_S)  # a terminal that takes nothing any more (Ctrl-S) is no reason to stay


@contextlib.contextmanager
def _logging_to(display: Display) -> Iterator[None]:
    """Whatever is logged goes by way of whoever has the screen, who writes it above."""
    if isinstance(display, Lines):
        yield
        return
    handlers = [
        h for h in log.handlers if isinstance(h, logging.StreamHandler) and not isinstance(h, logging.FileHandler)
    ]
    before = [(handler, handler.stream) for handler in handlers]
    for handler in handlers:
        handler.setStream(display)
    try:
        yield
    finally:
        for handler, old in before:
            handler.setStream(old)
