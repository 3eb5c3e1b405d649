"""run.db, for looking only: a run that is over, that goes on in another process, or that was left half-written.

Whoever writes is not disturbed. What cannot be read is told in one line, with what to do.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from wide.errors import UsageError

DATABASE = "run.db"
FORMAT = 1  # of run.db; a higher one was written by a newer version
MANY = 50_000


def found(run: str | Path) -> Path:
    """The folder of a run: by its path, or by its name in `runs`; `latest` is the newest one there."""
    path, among = Path(run), Path("runs")
    if path.exists() or not among.is_dir():
        return path
    if str(run) == "latest":
        newest = sorted(among.glob(f"*/{DATABASE}"), key=lambda file: file.stat().st_mtime)
        return newest[-1].parent if newest else path
    return among / path if (among / path / DATABASE).exists() else path


class Reading:
    """One connection. Tables that an older version did not have are empty."""

    def __init__(self, folder: Path) -> None:
        path = folder / DATABASE
        if not path.exists():
            raise UsageError(f"{folder}: there is no run in it (no {DATABASE}); give a run's folder, such as runs/…")
        self.folder, self._db = folder, _opened(path)
        try:
            (found,) = self._db.execute("PRAGMA user_version").fetchone()
            names = self._db.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')").fetchall()
        except sqlite3.Error as error:
            self._db.close()
            raise UsageError(f"{path} cannot be read ({error}): it is damaged, or not a run's") from None
        self._tables = {name for (name,) in names}
        if found > FORMAT:
            self._db.close()
            raise UsageError(f"{folder} was written by a newer version of wide: update this one to look at it")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @property
    def identity(self) -> float | None:
        """When its first node joined. Another moment: another run is in this folder now."""
        ((joined_at,),) = self.rows("nodes", "SELECT joined_at FROM nodes ORDER BY rowid LIMIT 1") or [(None,)]
        return joined_at if isinstance(joined_at, float) else None

    def metrics(self, most: int = 2_000) -> list[tuple[int, str, float | None]]:
        """After which step, name and value: what evaluate() said, and what the loss has logged, of that about so many.
        A name that both use is evaluate()'s.
        """
        said = self.rows("evaluations", "SELECT step, metric, value FROM evaluations ORDER BY step")
        counted = self.rows("logged", "SELECT count(*), count(DISTINCT metric) FROM logged")
        ((count, names),) = counted or [(0, 0)]
        query = """SELECT step + 1, metric, value FROM logged
            WHERE rowid % ? < ? AND metric NOT IN (SELECT metric FROM evaluations) ORDER BY step"""
        return said + self.rows("logged", query, max(names, count // most), names)

    def rows(self, table: str, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Of that table, by that query."""
        return [row for many in self.many(table, query, *values) for row in many]

    def many(self, table: str, query: str, *values: Any) -> Iterator[list[tuple[Any, ...]]]:
        """The same, some at a time."""
        if table not in self._tables:
            return
        try:
            cursor = self._db.execute(query, values)
            while rows := cursor.fetchmany(MANY):
                yield rows
        except sqlite3.Error as error:
            raise UsageError(f"{self.folder / DATABASE} cannot be read ({error}): it is damaged") from None


def _opened(path: Path) -> sqlite3.Connection:
    """Reading a run beside its writer needs a file of theirs. Where that cannot be made (a disk that is only for
    reading), nobody writes either, and a copy is read, with what the writer had not put in its place yet.
    """
    try:
        return _connected(path)
    except sqlite3.OperationalError:
        pass
    except sqlite3.Error as error:
        raise UsageError(f"{path} cannot be read ({error}): it is damaged, or not a run's") from None
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in (path, path.with_name(f"{path.name}-wal")):
                if part.exists():
                    shutil.copy(part, folder)
            found, copy = _connected(Path(folder) / path.name), sqlite3.connect(":memory:")
            found.backup(copy)
            found.close()
            return copy
    except (sqlite3.Error, OSError) as error:
        raise UsageError(f"{path} cannot be read ({error}): it is damaged, or not a run's") from None


def _connected(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(f"file:{quote(str(path.resolve()))}?mode=ro", uri=True, timeout=5.0)
    db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return db
