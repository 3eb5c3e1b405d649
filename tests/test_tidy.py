"""run.db stays small: what is old is kept in less room, and still proves that each batch was merged once."""

from __future__ import annotations

import logging
import random
import sqlite3

import pytest

from benchmarks.staged import Staged
from wide.job.schedule import Schedule
from wide.store import tidy
from wide.store.rundb import SCHEMA, RunDb
from wide.store.tidy import Room
from wide.telemetry import log as log_module
from wide.telemetry.log import logging_to

SCHEDULE = Schedule(100, 8, 4, 0)  # 13 batches, 4 steps (4, 4, 4, 1) in an epoch
NARROW = Room(*(4 for _ in Room._fields))
WIDE = Room(*(10**9 for _ in Room._fields))


def filled(steps, by_epoch=lambda step: False, cut=None):
    """A ledger as a pool of three would leave it, in pieces."""
    chance = cut or random.Random(1)
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.executescript(SCHEMA)
    shape = (SCHEDULE.samples, SCHEDULE.batch_size, SCHEDULE.batches_per_step)
    db.execute(
        "INSERT INTO shape VALUES (0, ?, ?, ?, ?, ?)", (*shape, SCHEDULE.batches_per_epoch, SCHEDULE.steps_per_epoch)
    )
    for number in range(steps):
        step = SCHEDULE.step(number)
        start, first = step.first if by_epoch(number) else 0, 0
        while first < step.batches:
            end = chance.randint(first + 1, step.batches)
            samples = sum(SCHEDULE.sizes(step, first, end))
            row = (number, start + first, start + end - 1, chance.randint(1, 3), samples, 0.5, number + 1, number, 7)
            db.execute("INSERT INTO ledger VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            first = end
        db.execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?, ?)", (number, step.epoch, step.samples, 0.5, 0.1, number))
    return db


def coverage(db, by_epoch=lambda step: False):
    """(step, batch within the step) of each row, and the samples of each step."""
    found, samples = [], {}
    for step, first, last, count in db.execute("SELECT step, first_batch, last_batch, samples FROM ledger"):
        start = SCHEDULE.step(step).first if by_epoch(step) else 0
        found += [(step, batch - start) for batch in range(first, last + 1)]
        samples[step] = samples.get(step, 0) + count
    return sorted(found), samples


@pytest.mark.parametrize("kind", ["sync", "async", "changed on the way"])
def test_a_folded_ledger_covers_the_same_batches_once(kind):
    by_epoch = {"sync": lambda s: False, "async": lambda s: True, "changed on the way": lambda s: 10 <= s < 21}[kind]
    db = filled(40, by_epoch)
    before = coverage(db, by_epoch)
    shares = db.execute("SELECT node, sum(samples) FROM ledger GROUP BY node ORDER BY node").fetchall()
    for safe in (7, 7, 22, 33):
        tidy.tidy(db, safe, NARROW._replace(steps=10**9))
        assert coverage(db, by_epoch) == before
    assert len(db.execute("SELECT * FROM ledger_rows").fetchall()) < 20
    assert len(db.execute("SELECT * FROM folded").fetchall()) <= (1 if kind != "changed on the way" else 8)
    query = """SELECT node, sum(samples) FROM (SELECT node, samples FROM shares UNION ALL
        SELECT node, samples FROM ledger_rows) GROUP BY node ORDER BY node"""
    assert db.execute(query).fetchall() == shares, "who did how much is still known"


def test_a_ledger_that_was_folded_goes_on_and_back():
    db = filled(40)
    tidy.tidy(db, 20, NARROW._replace(steps=10**9))
    db.execute("INSERT INTO ledger VALUES (40, 0, 3, 1, 32, 0.5, 41, 1.0, 9)")
    assert db.execute("SELECT count(*) FROM ledger WHERE step = 40").fetchone() == (1,)
    tidy.rewind(db, 30, 30)
    assert {step for step, _ in coverage(db)[0]} == set(range(30))
    tidy.rewind(db, 12, 12)
    assert {step for step, _ in coverage(db)[0]} == set(range(12)), "even to before what was folded"


@pytest.mark.parametrize("wrong", ["twice", "missing", "overlapping"])
def test_what_is_not_there_once_is_left_as_it_is(wrong):
    db = filled(20)
    if wrong == "missing":
        db.execute("DELETE FROM ledger WHERE step = 5")
        db.execute("INSERT INTO ledger VALUES (5, 0, 0, 2, 8, 0.5, 6, 1.0, 1), (5, 2, 3, 2, 16, 0.5, 6, 1.0, 1)")
    else:
        db.execute("INSERT INTO ledger VALUES (5, ?, 1, 2, 8, 0.5, 6, 1.0, 1)", (0 if wrong == "twice" else 1,))
    before = sorted(db.execute("SELECT * FROM ledger").fetchall())
    tidy.tidy(db, 15, NARROW)
    assert sorted(db.execute("SELECT * FROM ledger").fetchall()) == before


@pytest.mark.parametrize("is_folded", [False, True])
def test_a_ledger_that_an_older_version_began_gets_a_column_for_digests(tmp_path, is_folded):
    db = filled(40)
    if is_folded:
        tidy.tidy(db, 20, NARROW._replace(steps=10**9))
        db.execute("DROP VIEW ledger")
    db.execute(f"ALTER TABLE {'ledger_rows' if is_folded else 'ledger'} DROP COLUMN digest")
    if is_folded:
        before = (
            tidy._VIEW.replace(", digest", "").replace(", NEW.digest", "").replace("committed_at, NULL", "committed_at")
        )
        for statement in tidy._statements(before):
            db.execute(statement)
    covered = coverage(db)
    with sqlite3.connect(tmp_path / "run.db") as old:
        db.backup(old)
    run = RunDb(tmp_path / "run.db")
    run.insert("ledger", [(40, 0, 3, 1, 32, 0.5, 41, 1.0, -5)])
    assert run.settle(10.0)
    assert run.read("SELECT DISTINCT step, digest FROM ledger WHERE digest IS NOT NULL") == [(40, -5)]
    run.rewind(40, 40)
    run.close()
    with sqlite3.connect(tmp_path / "run.db") as new:
        assert coverage(new) == covered
    RunDb(tmp_path / "run.db").close()  # and again


def test_of_what_was_folded_no_digest_is_left():
    db = filled(40)
    tidy.tidy(db, 20, NARROW._replace(steps=10**9))
    assert db.execute("SELECT DISTINCT digest FROM ledger WHERE step < 20").fetchall() == [(None,)]
    assert db.execute("SELECT DISTINCT digest FROM ledger WHERE step >= 20").fetchall() == [(7,)]
    tidy.forget_digests(db)
    assert db.execute("SELECT DISTINCT digest FROM ledger").fetchall() == [(None,)]


@pytest.mark.parametrize("is_folded", [False, True])
def test_what_was_merged_for_a_version_that_is_void_is_gone(is_folded):
    db = filled(40)
    if is_folded:
        tidy.tidy(db, 20, NARROW._replace(steps=10**9))
    tidy.void(db, 40)
    assert {step for step, _ in coverage(db)[0]} == set(range(39))


def test_a_small_ledger_is_a_table_as_it_always_was():
    db = filled(20)
    tidy.tidy(db, 15)
    assert db.execute("SELECT type FROM sqlite_master WHERE name = 'ledger'").fetchone() == ("table",)


def test_old_steps_are_added_up():
    db = filled(64)
    for safe in (40, 60):
        tidy.tidy(db, safe, WIDE._replace(steps=16))
    rows = db.execute("SELECT count(*), max(step), sum(samples), sum(seconds) FROM steps").fetchone()
    assert rows[0] < 40
    assert rows[1:3] == (63, sum(SCHEDULE.step(i).samples for i in range(64)))
    assert rows[3] == pytest.approx(6.4)
    assert db.execute("SELECT count(*) FROM steps WHERE step >= 60").fetchone() == (4,), "not what may be undone"


def test_series_lose_every_second_point_of_their_older_half():
    db = filled(0)
    for at in range(100):
        db.execute("INSERT INTO samples VALUES (?, 1, 'batches', ?)", (at, at))
        db.execute("INSERT INTO samples VALUES (?, 2, 'batches', ?)", (at, at))
    tidy.tidy(db, 0, WIDE._replace(samples=150))
    left = [at for (at,) in db.execute("SELECT at FROM samples WHERE node = 2 ORDER BY at")]
    assert left == [*range(1, 50, 2), *range(50, 100)]
    db.execute("INSERT INTO samples VALUES (0, 3, 'batches', 600)")
    for _ in range(5):
        tidy.tidy(db, 0, WIDE._replace(samples=10))
    assert db.execute("SELECT max(value) FROM samples WHERE node = 3").fetchone() == (600,)
    assert db.execute("SELECT max(value) FROM samples WHERE node = 1").fetchone() == (99,)


def test_of_leases_the_first_and_the_last_are_kept():
    db = filled(0)
    for i in range(50):
        db.execute("INSERT INTO leases VALUES (?, 2, '[]', x'')", (i,))
    tidy.tidy(db, 0, WIDE._replace(leases=40, first_leases=10))
    assert [at for (at,) in db.execute("SELECT at FROM leases ORDER BY at")] == [*range(5), *range(30, 50)]


def test_run_db_does_not_outgrow_its_room(tmp_path, monkeypatch):
    monkeypatch.setattr("wide.store.rundb.TIDY_ROWS", 2000)
    room = Room(2000, 500, 4000, 100, 2000, 100, 100)
    monkeypatch.setattr("wide.store.tidy.tidy.__defaults__", (room,))
    run = Staged(tmp_path / "run", nodes=5, leases_per_s=100)
    run.run(30_000)
    run.close()
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        for table, most in (("ledger_rows", 2000 + 9000), ("steps", 1500), ("samples", 9000), ("leases", 200)):
            (count,) = db.execute(f"SELECT count(*) FROM {table}").fetchone()
            assert 0 < count < most, table
        covered = db.execute("SELECT count(*) FROM (SELECT step FROM ledger GROUP BY step)").fetchone()
        (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
        assert covered == (last + 1,)
        batches = "SELECT sum(last_batch - first_batch + 1), sum(samples) FROM ledger"
        assert db.execute(batches).fetchone()[0] >= 30_000


def test_a_run_of_an_older_version_is_not_folded(tmp_path):
    db = filled(20)
    db.execute("DELETE FROM shape")
    tidy.tidy(db, 15, NARROW)
    assert db.execute("SELECT type FROM sqlite_master WHERE name = 'ledger'").fetchone() == ("table",)


def test_the_log_turns_over(tmp_path, monkeypatch):
    monkeypatch.setattr(log_module, "MOST_NBYTES", 2000)
    with logging_to("silent", tmp_path / "log.jsonl"):
        for i in range(200):
            logging.getLogger("wide").info("line %d", i)
    assert {path.name for path in tmp_path.iterdir()} == {"log.jsonl", "log.jsonl.1", "log.jsonl.2"}
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 6500
    assert "line 199" in (tmp_path / "log.jsonl").read_text()


def test_a_thread_beside_the_rows_may_fail_without_them(tmp_path):
    db = RunDb(tmp_path / "run.db")
    done = []
    db.beside(lambda: done.append(1))
    db.insert("events", [(1.0, "joined", 1, "somebody")])
    assert db.settle(10.0)
    assert done == [1]
    db.close()
