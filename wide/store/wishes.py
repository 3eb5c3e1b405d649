"""What a run's owner asks of it while it runs, as run.db has it: to pause, to save, to stop, to send a node away.

Asked by another process, carried out and answered by the run's coordinator. What was asked of a coordinator that is
gone is not carried out by the next one.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from wide.errors import NotYet, UsageError
from wide.store.lock import is_held
from wide.store.reading import DATABASE

What = Literal["pause", "resume", "checkpoint", "stop", "drop"]
PATIENCE_S, LOOK_S = 10.0, 0.1
ANSWER = "UPDATE wishes SET answer = ? WHERE id = ?"


class Wish(NamedTuple):
    id: int
    what: str
    node: int | None  # that it is about


class Wishes:
    """The coordinator's end. `write` hands a statement, and rows for it, to run.db's thread."""

    def __init__(self, path: Path, write: Callable[[str, Sequence[tuple[Any, ...]]], None]) -> None:
        self._path, self._write = path, write
        self._db: sqlite3.Connection | None = None
        self._last = 0
        self.is_paused = False  # whoever begins anew in the same process goes on like that

    def new(self) -> list[Wish]:
        """Since the last time. Whoever trains does not wait for it."""
        found = [Wish(*row) for row in self._rows("SELECT id, what, node FROM wishes WHERE id > ?", self._last)]
        self._last = max((wish.id for wish in found), default=self._last)
        return found

    def answer(self, wish: Wish, words: str) -> None:
        self._write(ANSWER, [(words, wish.id)])

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def _rows(self, query: str, *values: int) -> list[tuple[Any, ...]]:
        try:
            if self._db is None:
                where = f"{self._path.absolute().as_uri()}?mode=ro"
                self._db = sqlite3.connect(where, uri=True, timeout=0.0, check_same_thread=False)
                self._db.text_factory = lambda text: text.decode(errors="replace")
            return self._db.execute(query, values).fetchall()
        except sqlite3.Error:  # it is just being written: the next look is soon
            return []


def forget(folder: Path) -> None:
    """What was asked of a coordinator before this one."""
    with contextlib.suppress(NotYet):  # there is no such table yet
        if (folder / DATABASE).exists():
            _changed(folder / DATABASE, "DELETE FROM wishes")


def ask(folder: Path, what: What, node: int | None = None, patience_s: float = PATIENCE_S) -> str:
    """Of the run in that folder; its coordinator's answer. Raises NotYet if there is none, UsageError if it says no."""
    if not is_held(folder):
        raise NotYet("the run is not going on: there is nobody who could do that")
    path = folder / DATABASE
    id_ = _changed(path, "INSERT INTO wishes(what, node) VALUES (?, ?)", what, node)
    try:
        until = time.monotonic() + patience_s
        while time.monotonic() < until:
            with contextlib.closing(sqlite3.connect(path, timeout=patience_s)) as db:
                (words,) = db.execute("SELECT answer FROM wishes WHERE id = ?", (id_,)).fetchone() or (None,)
            if words is not None:
                return _said(words)
            time.sleep(LOOK_S)
    except sqlite3.Error as error:
        raise NotYet(f"{path} cannot be read ({error})") from None
    finally:
        _changed(path, "DELETE FROM wishes WHERE id = ?", id_)
    raise NotYet(f"the coordinator has not answered for {patience_s:g} s: it is busy, or ending")


def refusal(words: str) -> str:
    """An answer that says no."""
    return f"no: {words}"


def _said(words: str) -> str:
    if words.startswith("no: "):
        raise UsageError(words[4:])
    return words


def _changed(path: Path, statement: str, *values: Any) -> int:
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=PATIENCE_S)) as db, db:
            return db.execute(statement, values).lastrowid or 0
    except sqlite3.Error as error:
        raise NotYet(f"{path} cannot be written ({error})") from None
