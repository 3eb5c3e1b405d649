"""What survives a simulated coordinator: run.db and checkpoints, in memory. What was not safe when it crashed is lost,
as on a real disk. The same doors as store/rundb.py and coordinator/checkpoints.py have.
"""

from __future__ import annotations

import copy
import random
import sqlite3
from collections.abc import Callable, Sequence
from typing import Any

from wide.store import tidy
from wide.store.checkpoint import Checkpoint
from wide.store.rundb import SCHEMA

KEPT = 3
UNSEEN = ("samples", "leases", "events")  # nobody looks at these here
NARROW = tidy.Room(*(4 for _ in tidy.Room._fields))  # so that run.db is made smaller all the time


class Disk:
    """One run's folder."""

    def __init__(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.db.executescript(SCHEMA)
        self.checkpoints: list[Checkpoint] = []

    def newest(self) -> Checkpoint | None:
        """Read it: whoever goes on from it may change what was read, not what is on the disk."""
        return copy.deepcopy(self.checkpoints[-1]) if self.checkpoints else None

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self.db.execute(query, values).fetchall()


class MemoryDb:
    """One coordinator's way to run.db: rows wait until `settle`, or until a thread would have got to them."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._waiting: list[tuple[str, Sequence[tuple[Any, ...]]]] = []

    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows:
            self._waiting.append((statement, rows))

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None:
        if rows and table not in UNSEEN:
            self.write(f"INSERT INTO {table} VALUES ({','.join('?' * len(rows[0]))})", rows)

    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        return self._disk.read(query, *values)

    def settle(self, timeout_s: float = 0.0) -> bool:
        self._commit(len(self._waiting))
        return True

    def insert_packed(self, table: str, at: float, count: int, words: str, data: bytes) -> None:
        """Nobody looks at these."""

    def rewind(self, version: int, steps: int) -> None:
        self.settle()
        tidy.rewind(self._disk.db, version, steps)

    def void(self, version: int) -> None:
        self.settle()
        tidy.void(self._disk.db, version)

    def keep_from(self, step: int) -> None:
        tidy.tidy(self._disk.db, step, NARROW)

    def beside(self, deed: Callable[[], None]) -> None:
        """There is no other disk."""

    waiting = 0

    def crash(self, chance: random.Random) -> None:
        """The thread had got that far."""
        self._commit(chance.randint(0, len(self._waiting)))
        self._waiting.clear()

    def _commit(self, count: int) -> None:
        for statement, rows in self._waiting[:count]:
            self._disk.db.executemany(statement, rows)
        del self._waiting[:count]


class MemoryWriter:
    """Writes checkpoints at once; but the newest is not on the disk before the next thing happens."""

    took_s = 0.0

    def __init__(self, disk: Disk, db: MemoryDb) -> None:
        self._disk, self._db = disk, db
        self._waiting: Checkpoint | None = None

    def put(self, checkpoint: Checkpoint) -> None:
        self.settle()
        self._waiting = checkpoint

    def name_best(self, step: int) -> None:
        """Nobody goes on from there."""

    def settle(self) -> None:
        """The ledger comes first."""
        if self._waiting is not None:
            self._db.settle()
            self._disk.checkpoints = [*self._disk.checkpoints, self._waiting][-KEPT:]
            self._db.keep_from(min(checkpoint.step for checkpoint in self._disk.checkpoints))
            self._waiting = None
