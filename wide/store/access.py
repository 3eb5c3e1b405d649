"""Who may come into a pool, as run.db has it: invites, and the machines that came by them. Secrets are not among it.

Read by the coordinator a few times a second; written by it, and by `wide invite` and `wide revoke`, which are other
processes.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wide.errors import UsageError

PATIENCE_S = 10.0  # the coordinator's own writes are short
INVITES = """SELECT id, name, made_at, expires_at, uses, revoked_at,
    (SELECT count(*) FROM machines WHERE invite = invites.id) FROM invites ORDER BY made_at"""
MACHINES = "SELECT id, name, address, invite, enrolled_at, revoked_at FROM machines ORDER BY enrolled_at"
OF_NODE = "SELECT DISTINCT machine FROM visits WHERE node = ?"
BY_NAME = """SELECT DISTINCT machine FROM visits JOIN nodes USING (node) WHERE nodes.name = ?
    UNION SELECT id FROM machines WHERE name = ?"""


class Access:
    """Of the run in that database, which must be there."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            raise UsageError(f"{path.parent}: there is no run in it (no {path.name})")
        self._path = path
        self._reader: sqlite3.Connection | None = None

    def invites(self) -> list[tuple[Any, ...]]:
        """id, name, made_at, expires_at, uses, revoked_at, machines so far."""
        return self._read(INVITES)

    def machines(self) -> list[tuple[Any, ...]]:
        """id, name, address, invite, enrolled_at, revoked_at."""
        return self._read(MACHINES)

    def revoked(self) -> list[str]:
        return [machine for (machine,) in self._read("SELECT id FROM machines WHERE revoked_at IS NOT NULL")]

    def add(self, invite: str, name: str, made_at: float, expires_at: float, uses: int) -> None:
        with self._writing() as db:
            db.execute("INSERT INTO invites VALUES (?,?,?,?,?,NULL)", (invite, name, made_at, expires_at, uses))

    def machines_of(self, what: str) -> list[str]:
        """The machines that somebody means by an id, a node's number, or a name."""
        known = {row[0] for row in self.machines()}
        if what in known:
            return [what]
        found = self._read(OF_NODE, int(what)) if what.isascii() and what.isdigit() and len(what) < 16 else []
        found = found or self._read(BY_NAME, what, what)
        return sorted({machine for (machine,) in found} & known)

    def revoke(self, table: str, ids: list[str], at: float) -> None:
        assert table in ("invites", "machines")
        with self._writing() as db:
            statement = f"UPDATE {table} SET revoked_at=? WHERE id=? AND revoked_at IS NULL"
            db.executemany(statement, [(at, name) for name in ids])

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        if self._reader is None:
            self._reader = sqlite3.connect(f"{self._path.absolute().as_uri()}?mode=ro", uri=True, timeout=PATIENCE_S)
        try:
            return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be read ({error})") from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=PATIENCE_S)) as db, db:
                yield db
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be written ({error})") from None
