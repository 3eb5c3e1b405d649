"""How a run is shown while it trains: one line that lives (in a terminal, in a notebook), or a line now and then (in a
pipe, in a log file). Its own thread reads the window; nobody waits for it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from wide.dashboard.progress import Progress
from wide.telemetry.log import log
from wide.telemetry.snapshot import Window

REFRESH_S = 0.25
NOTEBOOK_S = 1.0
PIPED_S = 30.0
FIRST_S = 5.0  # whatever is shown seldom is shown after this for the first time

Show = Callable[[str], None]


@contextlib.contextmanager
def watching(window: Window, is_wanted: bool) -> Iterator[None]:
    """Show the run while the block runs. Log lines pass above a line that lives."""
    if not is_wanted:
        yield
        return
    is_notebook = getattr(sys.stderr, "is_notebook", False) or type(sys.stderr).__module__.startswith("ipykernel")
    kind = _in_terminal if sys.stderr.isatty() else _in_notebook if is_notebook else _in_pipe
    with kind() as (show, every_s):
        stop, progress = threading.Event(), Progress(window)

        def keep_showing() -> None:
            due = time.monotonic() + min(every_s, FIRST_S)
            while not stop.wait(REFRESH_S):
                progress.see()
                if (now := time.monotonic()) >= due:
                    due = now + every_s
                    show(progress.line(now))

        thread = threading.Thread(target=keep_showing, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


@contextlib.contextmanager
def _in_terminal() -> Iterator[tuple[Show, float]]:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live, _logging_to(sys.stderr):
        yield lambda line: live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True), REFRESH_S


@contextlib.contextmanager
def _in_notebook() -> Iterator[tuple[Show, float]]:
    """Cells know the carriage return, and no other art."""
    living = LivingLine(sys.stderr)
    with _logging_to(living):
        try:
            yield living.show, NOTEBOOK_S
        finally:
            living.show("")


@contextlib.contextmanager
def _in_pipe() -> Iterator[tuple[Show, float]]:
    yield lambda line: log.info("%s", line), PIPED_S


@contextlib.contextmanager
def _logging_to(stream: Any) -> Iterator[None]:
    """Whatever is logged goes by way of whoever has the line, who writes it above."""
    handlers = [h for h in log.handlers if type(h) is logging.StreamHandler]
    before = [(handler, handler.stream) for handler in handlers]
    for handler in handlers:
        handler.setStream(stream)
    try:
        yield
    finally:
        for handler, old in before:
            handler.setStream(old)


class LivingLine:
    """A stream with one line at its end that is written again and again."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._line, self._lock = stream, "", threading.Lock()

    def show(self, line: str) -> None:
        with self._lock:
            rest = " " * (len(self._line) - len(line))
            self._stream.write(f"\r{line}{rest}" if line else f"\r{rest}\r")
            self._line = line

    def write(self, text: str) -> int:
        with self._lock:
            self._stream.write(f"\r{' ' * len(self._line)}\r{text}" if self._line else text)
            if text.endswith("\n"):
                self._stream.write(self._line)
        return len(text)

    def flush(self) -> None:
        self._stream.flush()
