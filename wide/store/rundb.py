"""run.db: the durable record of a run. Knows SQLite; knows nothing of what the numbers mean.

Writes are handed to one thread, so that a slow disk never stops training; any tool may read meanwhile (WAL). A disk
that is full, or fails, is told of, and tried again until it takes what waits.
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from wide.errors import TrainingFailed
from wide.failpoint import reach
from wide.store import tidy
from wide.store.reading import FORMAT

RETRY_S = 0.5
CLOSING_S = 10.0  # how long a disk that fails is tried when all is over
MOST_WAITING = 200_000  # writes; then memory is worth more than hope
JOURNAL_NBYTES = 16 << 20  # more than that is given back
TIDY_ROWS = 200_000  # are written until it is seen whether there are too many

SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger(step INTEGER, first_batch INTEGER, last_batch INTEGER, node INTEGER,
    samples INTEGER, loss REAL, version INTEGER, committed_at REAL, digest INTEGER);
CREATE TABLE IF NOT EXISTS steps(step INTEGER, epoch INTEGER, samples INTEGER, loss REAL, seconds REAL, merged_at REAL);
CREATE INDEX IF NOT EXISTS steps_in_order ON steps(step);
CREATE TABLE IF NOT EXISTS nodes(node INTEGER, name TEXT, host TEXT, joined_at REAL, left_at REAL, why TEXT);
CREATE TABLE IF NOT EXISTS rejects(at REAL, node INTEGER, reason TEXT, detail TEXT);
CREATE TABLE IF NOT EXISTS samples(at REAL, node INTEGER, metric TEXT, value REAL);
CREATE TABLE IF NOT EXISTS choices(at REAL, node INTEGER, role TEXT, codec TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS evaluations(at REAL, epoch INTEGER, step INTEGER, metric TEXT, value REAL);
CREATE TABLE IF NOT EXISTS logged(step INTEGER, metric TEXT, value REAL, samples REAL);
CREATE TABLE IF NOT EXISTS invites(id TEXT PRIMARY KEY, name TEXT, made_at REAL, expires_at REAL, uses INTEGER,
    revoked_at REAL);
CREATE TABLE IF NOT EXISTS machines(id TEXT PRIMARY KEY, name TEXT, address TEXT, invite TEXT, enrolled_at REAL,
    revoked_at REAL);
CREATE TABLE IF NOT EXISTS visits(node INTEGER, machine TEXT, address TEXT, at REAL);
CREATE TABLE IF NOT EXISTS verified(node INTEGER PRIMARY KEY, samples INTEGER);
CREATE TABLE IF NOT EXISTS leases(at REAL, leases INTEGER, words TEXT, data BLOB);
CREATE TABLE IF NOT EXISTS events(at REAL, kind TEXT, node INTEGER, words TEXT);
CREATE TABLE IF NOT EXISTS live(id INTEGER PRIMARY KEY CHECK (id = 0), at REAL, snapshot TEXT);
CREATE TABLE IF NOT EXISTS wishes(id INTEGER PRIMARY KEY AUTOINCREMENT, what TEXT, node INTEGER, answer TEXT);
CREATE TABLE IF NOT EXISTS generations(kind TEXT PRIMARY KEY, generation INTEGER);
CREATE TABLE IF NOT EXISTS shape(id INTEGER PRIMARY KEY CHECK (id = 0), samples_per_epoch INTEGER, batch_size INTEGER,
    batches_per_step INTEGER, batches_per_epoch INTEGER, steps_per_epoch INTEGER);
"""


Deed = Callable[[sqlite3.Connection], None]


class RunDb:
    """`write` returns at once, `settle` and `close` when all is on disk. `tell` is told of trouble, and of its end."""

    def __init__(self, path: Path, tell: Callable[[str], None] = lambda words: None) -> None:
        self._path, self._tell = path, tell
        self._queue: SimpleQueue[tuple[str, Sequence[tuple[Any, ...]]] | Deed | threading.Event | None] = SimpleQueue()
        self._safe_step = self._rows = 0
        self._problem: Exception | None = None
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="run.db", daemon=True)
        create(path)
        self._thread.start()

    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._raise_problem()
        if rows:
            self._queue.put((statement, rows))
        if self._queue.qsize() > MOST_WAITING:
            raise TrainingFailed(f"{self._path} cannot be written, and too much waits for it")

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What is in it; of what was written, that which `settle` has waited for."""
        db = sqlite3.connect(self._path)
        try:
            return db.execute(query, values).fetchall()
        finally:
            db.close()

    def rewind(self, version: int, steps: int) -> None:
        """What was written after that version, or is about later steps, is dropped."""
        self._queue.put(lambda db: tidy.rewind(db, version, steps))

    def void(self, version: int) -> None:
        """What was merged for that version does not count."""
        self._queue.put(lambda db: tidy.void(db, version))

    def forget_digests(self) -> None:
        """Those that are in the ledger mean nothing any more."""
        self._queue.put(tidy.forget_digests)

    def keep_from(self, step: int) -> None:
        """Nobody will go back to a step before this one: what is older may be kept in less room."""
        self._safe_step = step

    def beside(self, deed: Callable[[], None]) -> None:
        """Something else that writes to the disk, in its turn. Its trouble is its own."""
        self._queue.put(lambda db: deed())

    @property
    def waiting(self) -> int:
        """Writes that the disk has not taken yet."""
        return self._queue.qsize()

    def settle(self, timeout_s: float) -> bool:
        """Wait until all that was written before is safe, even from a power cut. Did it get there in time?"""
        is_safe = threading.Event()
        self._queue.put(is_safe)
        return is_safe.wait(timeout_s) and self._problem is None

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self.write(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)

    def insert_packed(self, table: str, at: float, count: int, words: str, data: bytes) -> None:
        """One row for many: so many things of one size, compressed, and the words that they use."""
        statement = f"INSERT INTO {table} VALUES (?, ?, ?, ?)"
        self._queue.put(lambda db: _execute(db, statement, [(at, count, words, zlib.compress(data, 1))]))

    def close(self) -> None:
        self._is_closing.set()
        self._queue.put(None)
        self._thread.join()
        self._raise_problem()

    def _work(self) -> None:
        db = sqlite3.connect(self._path)
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={JOURNAL_NBYTES}")
        while (item := self._queue.get()) is not None:
            if isinstance(item, threading.Event):
                self._persist(lambda: _sync(db))
                item.set()
            elif isinstance(item, tuple):
                self._persist(functools.partial(_execute, db, *item))
                self._rows += len(item[1])
            else:
                self._persist(functools.partial(item, db))
            if self._rows >= TIDY_ROWS:
                self._rows = 0
                self._persist(functools.partial(tidy.tidy, db, self._safe_step))
        db.close()

    def _persist(self, deed: Callable[[], None]) -> None:
        """Again and again, if it fails because of the disk; at the end of a run not for ever."""
        attempts_left = int(CLOSING_S / RETRY_S)
        is_in_trouble = False
        while self._problem is None:
            try:
                deed()
                break
            except (sqlite3.OperationalError, OSError) as error:
                if not is_in_trouble:
                    self._tell(f"{self._path} cannot be written ({error}): trying again until it can")
                is_in_trouble = True
                if self._is_closing.wait(RETRY_S):  # which then returns at once
                    time.sleep(RETRY_S)
                    attempts_left -= 1
                self._problem = error if not attempts_left else None
            except (sqlite3.Error, OverflowError) as error:
                self._problem = error
        if is_in_trouble and self._problem is None:
            self._tell(f"{self._path} can be written again")

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise TrainingFailed(f"{self._path} can no longer be written: {self._problem}")


def create(path: Path) -> None:
    """The tables, where they are missing."""
    try:
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(SCHEMA)
            tidy.add_digests(db)
            db.execute(f"PRAGMA user_version={FORMAT}")
    except sqlite3.Error as error:
        raise TrainingFailed(f"{path} cannot be written ({error}): choose another folder with --out") from None


def _execute(db: sqlite3.Connection, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
    with db:
        reach("run.db.commit")
        db.executemany(statement, rows)


def _sync(db: sqlite3.Connection) -> None:
    """With synchronous=FULL the next commit waits for the disk, and with it all that was committed before."""
    db.execute("PRAGMA synchronous=FULL")
    try:
        with db:
            db.execute("INSERT INTO samples VALUES (?, NULL, 'synced', 1)", (time.time(),))
    finally:
        db.execute("PRAGMA synchronous=NORMAL")
