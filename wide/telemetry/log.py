"""Three tiers of log: silent, normal, verbose. On stderr as text, in the run's folder as JSON lines.

Silent and normal cost nothing on the way of a gradient: whatever happens once a lease is logged at DEBUG only.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger("wide")
log.addHandler(logging.NullHandler())
log.propagate = False

INVITE = re.compile(r"wide1_[a-z2-7]+", re.IGNORECASE)
STATUS_S = 30.0
CLEAR = "\r\x1b[K"
MOST_NBYTES = 16 << 20  # of one log.jsonl
LEVELS = {"silent": logging.ERROR, "normal": logging.INFO, "verbose": logging.DEBUG}


class _NoInvites(logging.Filter):
    """An invite is a secret, wherever it came from: a path, an error, somebody's name."""

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if (shown := without_invites(text)) != text:
            record.msg, record.args = shown, ()
        return True


def without_invites(text: str) -> str:
    return INVITE.sub("wide1_…", text)


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {"at": record.created, "level": record.levelname.lower(), "text": record.getMessage()}
        return msgspec.json.encode(fields | getattr(record, "fields", {})).decode()


class _Lines(logging.handlers.RotatingFileHandler):
    """A line that the disk does not take is lost here; stderr has it. What is long ago goes into log.jsonl.1, then into
    log.jsonl.2, and then away.
    """

    def __init__(self, file: Path) -> None:
        super().__init__(file, maxBytes=MOST_NBYTES, backupCount=2, encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  (logging's name)
        pass


class _Words(logging.StreamHandler[Any]):
    """How things stand is told again and again: in a line that lives, where that is possible, or now and then."""

    def __init__(self, stream: Any, lives: bool) -> None:
        super().__init__(stream)
        self._lives = lives and stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")
        self._has_line, self._told_at = False, -STATUS_S

    def emit(self, record: logging.LogRecord) -> None:
        is_status = getattr(record, "is_status", False)
        if is_status and not self._lives:
            if record.created - self._told_at < STATUS_S:
                return
            self._told_at = record.created
        if self._has_line:
            self.stream.write(CLEAR)
        self.terminator = "" if is_status and self._lives else "\n"
        self._has_line = is_status and self._lives
        super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        return text[: shutil.get_terminal_size().columns - 1] if self._has_line else text

    def close(self) -> None:
        if self._has_line:
            with contextlib.suppress(OSError, ValueError):
                self.stream.write(CLEAR)
                self.stream.flush()
        super().close()


@contextlib.contextmanager
def logging_to(tier: str, file: Path | None = None, lives: bool = False) -> Iterator[None]:
    """Log to stderr, and to `file`, while the block runs. `lives`: this process is the only one that writes there."""
    level = LEVELS[tier]
    words = _Words(sys.stderr, lives)
    words.setLevel(level)
    words.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    words.addFilter(lambda record: not getattr(record, "is_for_file", False))  # the command itself says these
    handlers: list[logging.Handler] = [words]
    if file is not None:
        lines = _Lines(file)
        lines.setFormatter(_JsonLines())
        handlers.append(lines)
    log.setLevel(min(level, logging.INFO))
    for handler in handlers:
        handler.addFilter(_NoInvites())
        log.addHandler(handler)
    try:
        yield
    finally:
        for handler in handlers:
            log.removeHandler(handler)
        words.close()
        if file is not None:
            with contextlib.suppress(OSError):  # a full disk
                handlers[1].close()
