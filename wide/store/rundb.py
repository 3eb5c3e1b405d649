"""run.db: the durable record of a run. Knows SQLite; knows nothing of what the numbers mean.

Writes are handed to one thread, so that a slow disk never stops training; any tool may read meanwhile (WAL).
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from wide.errors import TrainingFailed

SCHEMA = """
CREATE TABLE IF NOT EXISTS ledger(step INTEGER, first_batch INTEGER, last_batch INTEGER, node INTEGER,
    samples INTEGER, loss REAL, version INTEGER, committed_at REAL);
CREATE TABLE IF NOT EXISTS steps(step INTEGER, epoch INTEGER, samples INTEGER, loss REAL, seconds REAL, merged_at REAL);
CREATE TABLE IF NOT EXISTS nodes(node INTEGER, name TEXT, host TEXT, joined_at REAL, left_at REAL, why TEXT);
CREATE TABLE IF NOT EXISTS rejects(at REAL, node INTEGER, reason TEXT, detail TEXT);
CREATE TABLE IF NOT EXISTS samples(at REAL, node INTEGER, metric TEXT, value REAL);
CREATE TABLE IF NOT EXISTS choices(at REAL, node INTEGER, role TEXT, codec TEXT, reason TEXT);
CREATE TABLE IF NOT EXISTS evaluations(at REAL, epoch INTEGER, step INTEGER, metric TEXT, value REAL);
"""


class RunDb:
    """Append-only from one thread's point of view; `write` returns at once, `close` when all is on disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._queue: SimpleQueue[tuple[str, Sequence[tuple[Any, ...]]] | None] = SimpleQueue()
        self._problem: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="run.db", daemon=True)
        try:
            db = sqlite3.connect(path)
            db.execute("PRAGMA journal_mode=WAL")
            db.executescript(SCHEMA)
            db.close()
        except sqlite3.Error as error:
            raise TrainingFailed(f"{path} cannot be written ({error}): choose another folder with --out") from None
        self._thread.start()

    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        self._raise_problem()
        if rows:
            self._queue.put((statement, rows))

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self.write(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()
        self._raise_problem()

    def _work(self) -> None:
        db = sqlite3.connect(self._path)
        db.execute("PRAGMA synchronous=NORMAL")
        while (item := self._queue.get()) is not None:
            try:
                with db:
                    db.executemany(*item)
            except (sqlite3.Error, OverflowError) as error:
                self._problem = self._problem or error
        db.close()

    def _raise_problem(self) -> None:
        if self._problem is not None:
            raise TrainingFailed(f"{self._path} can no longer be written: {self._problem}")
