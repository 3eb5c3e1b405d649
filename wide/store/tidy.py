"""run.db stays small: what is old is kept in less room, without losing what it proves. Knows run.db's tables.

- ledger: whole steps that every checkpoint has become one row for all of them (`folded`), once it was seen that each of
  their batches is there exactly once; `ledger` is a view of both from then on, with one row for such a step. Who did
  how much of them is in `shares`.
- steps, samples, evaluations, logged: of the older half, every two become one, whenever there are too many.
- leases, events, rejects: the oldest go; of leases the first ones are kept, too.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple


class Room(NamedTuple):
    """How many rows of each are kept as they are. At some 50 bytes each, all of them together stay below 150 MB."""

    ledger: int = 400_000
    steps: int = 200_000
    samples: int = 800_000
    evaluations: int = 100_000
    logged: int = 400_000
    leases: int = 1_000_000
    first_leases: int = 50_000
    events: int = 50_000


ROOM = Room()

# Batches of a step lie where its place in the epoch says; numbered within the step, or within the epoch.
_PLACES = """
    SELECT m.step, m.step % s.steps_per_epoch * s.batches_per_step AS start,
        min(s.batches_per_step, s.batches_per_epoch - m.step % s.steps_per_epoch * s.batches_per_step) AS size,
        min(m.first_batch) AS first, max(m.last_batch) AS last, sum(m.last_batch - m.first_batch + 1) AS batches,
        max(m.version) AS version, max(m.committed_at) AS at
    FROM (SELECT * FROM ledger_rows WHERE step < :below) m, shape s GROUP BY m.step"""
_ISLANDS = f"""
    INSERT INTO folded SELECT min(step), max(step), by_epoch, max(version), max(at) FROM (
        SELECT *, step - row_number() OVER (PARTITION BY by_epoch ORDER BY step) AS island FROM (
            SELECT step, version, at, coalesce(:by_epoch, first > 0) AS by_epoch FROM ({_PLACES})
        )
    ) GROUP BY by_epoch, island"""
_WRONG = f"""
    SELECT 1 FROM ({_PLACES}) WHERE batches != size OR last - first + 1 != size OR first NOT IN (0, start)
    UNION ALL
    SELECT 1 FROM (
        SELECT first_batch, lag(last_batch) OVER (PARTITION BY step ORDER BY first_batch) AS before
        FROM ledger_rows WHERE step < :below
    ) WHERE first_batch != before + 1 LIMIT 1"""
_SHARES = """
    INSERT INTO shares SELECT node, sum(last_batch - first_batch + 1), sum(samples), count(*)
        FROM ledger_rows WHERE step < :below GROUP BY node
    ON CONFLICT(node) DO UPDATE SET batches = batches + excluded.batches, samples = samples + excluded.samples,
        merges = merges + excluded.merges"""
_COLUMNS = "step, first_batch, last_batch, node, samples, loss, version, committed_at, digest"
_TABLES = """
    ALTER TABLE ledger RENAME TO ledger_rows;
    CREATE TABLE folded(first_step INTEGER, last_step INTEGER, by_epoch INTEGER, version INTEGER, committed_at REAL);
    CREATE TABLE shares(node INTEGER PRIMARY KEY, batches INTEGER, samples INTEGER, merges INTEGER);"""
_VIEW = f"""
    CREATE VIEW ledger AS
    SELECT {_COLUMNS} FROM ledger_rows
    UNION ALL
    SELECT step, by_epoch * start, by_epoch * start + size - 1, NULL,
        min((start + size) * batch_size, samples_per_epoch) - start * batch_size, NULL, version, committed_at, NULL
    FROM (
        WITH RECURSIVE each_step(step, last_step, by_epoch, version, committed_at) AS (
            SELECT * FROM folded UNION ALL
            SELECT step + 1, last_step, by_epoch, version, committed_at FROM each_step WHERE step < last_step
        )
        SELECT *, step % steps_per_epoch * batches_per_step AS start,
            min(batches_per_step, batches_per_epoch - step % steps_per_epoch * batches_per_step) AS size
        FROM each_step, shape
    );
    CREATE TRIGGER ledger_insert INSTEAD OF INSERT ON ledger BEGIN
        INSERT INTO ledger_rows VALUES (NEW.{", NEW.".join(_COLUMNS.split(", "))});
    END;"""


def tidy(db: sqlite3.Connection, safe_step: int, room: Room = ROOM) -> None:
    """Make room, in one transaction. All checkpoints have the steps before `safe_step`: nobody will go back there."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        _fold_ledger(db, safe_step, room.ledger)
        _halve_steps(db, safe_step, room.steps)
        _halve(db, "samples", "node, metric", room.samples)
        _halve(db, "evaluations", "metric", room.evaluations)
        _halve(db, "logged", "metric", room.logged)
        _drop_leases(db, room.leases, room.first_leases)
        _drop_oldest(db, "events", room.events)
        _drop_oldest(db, "rejects", room.events)
        _drop_oldest(db, "choices", room.events)


def rewind(db: sqlite3.Connection, version: int, steps: int) -> None:
    """The run goes on from there: what was written later is dropped, and will be computed again."""
    with db:
        db.execute("BEGIN IMMEDIATE")
        if _is_view(db):
            db.execute("DELETE FROM folded WHERE first_step >= ?", (steps,))
            db.execute("UPDATE folded SET last_step = ? WHERE last_step >= ?", (steps - 1, steps))
        db.execute(f"DELETE FROM {_ledger(db)} WHERE version > ?", (version,))
        db.execute("DELETE FROM steps WHERE step >= ?", (steps,))
        db.execute("DELETE FROM evaluations WHERE step > ?", (steps,))
        db.execute("DELETE FROM logged WHERE step >= ?", (steps,))


def void(db: sqlite3.Connection, version: int) -> None:
    """What was merged for that version, which was never made, does not count."""
    with db:
        db.execute(f"DELETE FROM {_ledger(db)} WHERE version = ?", (version,))


def forget_digests(db: sqlite3.Connection) -> None:
    """Nobody knows the key any more that they were made with."""
    with db:
        db.execute(f"UPDATE {_ledger(db)} SET digest = NULL WHERE digest IS NOT NULL")


def add_digests(db: sqlite3.Connection) -> None:
    """A ledger that was begun by an older version has none: a column for those to come."""
    table = _ledger(db)
    if any(column[1] == "digest" for column in db.execute(f"PRAGMA table_info({table})")):
        return
    with db:
        db.execute("BEGIN IMMEDIATE")
        db.execute(f"ALTER TABLE {table} ADD COLUMN digest INTEGER")
        if _is_view(db):
            db.execute("DROP VIEW ledger")  # and its trigger
            for statement in _statements(_VIEW):
                db.execute(statement)


def _fold_ledger(db: sqlite3.Connection, below: int, most: int) -> None:
    """What is not there exactly once is left as it is, for whoever wants to know why."""
    is_view = _is_view(db)
    if not below or _count(db, "ledger_rows" if is_view else "ledger") <= most:
        return
    if not db.execute("SELECT count(*) FROM shape").fetchone()[0]:
        return  # begun by an older version, which did not say
    if not is_view:
        for statement in _statements(_TABLES) + _statements(_VIEW):
            db.execute(statement)
    step = {"below": below}
    if db.execute(_WRONG, step).fetchone() is not None:
        return
    db.execute(_SHARES, step)
    kinds = db.execute(f"SELECT DISTINCT first > 0 FROM ({_PLACES}) WHERE start > 0", step).fetchall() or [(0,)]
    db.execute(_ISLANDS, step | {"by_epoch": kinds[0][0] if len(kinds) == 1 else None})
    db.execute("DELETE FROM ledger_rows WHERE step < :below", step)
    _join_folded(db)


def _join_folded(db: sqlite3.Connection) -> None:
    """Two that are next to each other, and of one kind, are one."""
    rows = db.execute("SELECT * FROM folded ORDER BY first_step").fetchall()
    joined: list[list[float]] = []
    for first, last, by_epoch, version, at in rows:
        if joined and joined[-1][1] + 1 == first and joined[-1][2] == by_epoch:
            joined[-1][1], joined[-1][3], joined[-1][4] = last, version, at
        else:
            joined.append([first, last, by_epoch, version, at])
    db.execute("DELETE FROM folded")
    db.executemany("INSERT INTO folded VALUES (?, ?, ?, ?, ?)", joined)


def _halve_steps(db: sqlite3.Connection, safe_step: int, most: int) -> None:
    """A row then stands for the steps since the one before it: samples and seconds are added up, the loss is a mean."""
    if (count := _count(db, "steps")) <= most:
        return
    (middle,) = db.execute("SELECT step FROM steps ORDER BY step LIMIT 1 OFFSET ?", (count // 2,)).fetchone()
    below = min(middle, safe_step)
    pairs = db.execute(
        """SELECT max(step), max(epoch), sum(samples), sum(loss * samples) / sum(samples * (loss IS NOT NULL)),
            sum(seconds), max(merged_at)
        FROM (SELECT *, (row_number() OVER (ORDER BY step) - 1) / 2 AS pair FROM steps WHERE step < ?) GROUP BY pair""",
        (below,),
    ).fetchall()
    db.execute("DELETE FROM steps WHERE step < ?", (below,))
    db.executemany("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", pairs)


def _halve(db: sqlite3.Connection, table: str, series: str, most: int) -> None:
    """Of the older half of each series, every second point goes; its newest stays, which says how far it came."""
    if (count := _count(db, table)) <= most:
        return
    (below,) = db.execute(f"SELECT rowid FROM {table} ORDER BY rowid LIMIT 1 OFFSET ?", (count // 2,)).fetchone()
    db.execute(
        f"""DELETE FROM {table} WHERE rowid IN (SELECT id FROM (
            SELECT rowid AS id, row_number() OVER (PARTITION BY {series} ORDER BY rowid DESC) AS i
            FROM {table} WHERE rowid < ?
        ) WHERE i % 2 = 0)""",
        (below,),
    )


def _drop_leases(db: sqlite3.Connection, most: int, first: int) -> None:
    """A row has many of them."""
    if db.execute("SELECT coalesce(sum(leases), 0) FROM leases").fetchone()[0] <= most + first:
        return
    db.execute(
        """DELETE FROM leases WHERE rowid IN (SELECT id FROM (
            SELECT rowid AS id, sum(leases) OVER (ORDER BY rowid) AS until, sum(leases) OVER () AS total FROM leases
        ) WHERE until > ? AND until <= total - ?)""",
        (first, most),
    )


def _drop_oldest(db: sqlite3.Connection, table: str, most: int) -> None:
    if (count := _count(db, table)) <= most:
        return
    too_many = count - most + most // 4  # and some more, so that this is not done again at once
    db.execute(f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} ORDER BY rowid LIMIT ?)", (too_many,))


def _is_view(db: sqlite3.Connection) -> bool:
    found = db.execute("SELECT type FROM sqlite_master WHERE name = 'ledger'").fetchone()
    return found is not None and found[0] == "view"


def _ledger(db: sqlite3.Connection) -> str:
    """The table that has its rows."""
    return "ledger_rows" if _is_view(db) else "ledger"


def _count(db: sqlite3.Connection, table: str) -> int:
    count: int = db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return count


def _statements(script: str) -> list[str]:
    """`executescript` would commit first. A trigger's own semicolon is followed by its END."""
    parts = script.replace("; END", "\0END").replace(";\n    END", "\0END").split(";")
    return [part.replace("\0END", ";\nEND") for part in parts if part.strip()]
