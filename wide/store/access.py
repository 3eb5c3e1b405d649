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


REVOKE_MACHINE = """INSERT INTO machines VALUES (?1, '', '', '', ?2, ?2)
    ON CONFLICT(id) DO UPDATE SET revoked_at = ?2 WHERE revoked_at IS NULL"""
REVOKE_INVITE = "UPDATE invites SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL"


GENERATION = "SELECT generation FROM generations WHERE kind = ?"
NEXT_GENERATION = """INSERT INTO generations VALUES (?1, 1)
    ON CONFLICT(kind) DO UPDATE SET generation = generation + 1"""


class Access:
    """Of the run in that database, which must be there. Whoever trains does not wait for it."""

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        if not path.exists():
            raise UsageError(f"{path.parent}: there is no run in it (no {path.name})")
        self._path, self._patience_s = path, patience_s

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
        if what in {row[0] for row in self.machines()}:
            return [what]
        found = self._read(OF_NODE, int(what)) if what.isascii() and what.isdigit() and len(what) < 16 else []
        found = found or self._read(BY_NAME, what, what)
        return sorted({machine for (machine,) in found} - set(self.revoked()))

    def revoke(self, machines: list[str], invites: list[str], at: float) -> None:
        """All of them, or none. A machine may have come whose row was lost in a crash."""
        with self._writing() as db:
            db.executemany(REVOKE_MACHINE, [(machine, at) for machine in machines])
            db.executemany(REVOKE_INVITE, [(at, invite) for invite in invites])

    def generation(self, kind: str) -> int:
        """How often the secret of viewers, or admins, was replaced."""
        found = self._read(GENERATION, kind)
        return int(found[0][0]) if found else 0

    def replace(self, kind: str) -> None:
        with self._writing() as db:
            db.execute(NEXT_GENERATION, (kind,))

    def _read(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """By a connection of its own, which sees what is there now, whatever became of the files meanwhile."""
        where = f"{self._path.absolute().as_uri()}?mode=ro"
        try:
            with contextlib.closing(sqlite3.connect(where, uri=True, timeout=self._patience_s)) as db:
                return db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be read ({error})") from None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        try:
            with contextlib.closing(sqlite3.connect(self._path, timeout=PATIENCE_S)) as db, db:
                yield db
        except sqlite3.Error as error:
            raise UsageError(f"{self._path} cannot be written ({error})") from None
