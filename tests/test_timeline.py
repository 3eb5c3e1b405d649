"""The lease timeline: what is drawn is what run.db has, of old runs and damaged ones, whatever the clock did."""

from __future__ import annotations

import os
import shutil
import sqlite3
import struct
import zlib

import numpy as np
import pytest

from benchmarks.staged import BEGAN_AT, Staged
from tests.dashboards import a_server, ask, found
from wide.dashboard.following import Followed
from wide.dashboard.leases import NEW, OLD, PARTS, Leases
from wide.dashboard.timeline import Window, drawn
from wide.store.reading import Reading
from wide.store.rundb import RunDb
from wide.telemetry.journey import PACK, Answer, Journey, Logbook


def leases_in(folder):
    leases = Leases()
    with Reading(folder) as run:
        leases.read(run)
    return leases


def leases_span_of_all(folder):
    with sqlite3.connect(folder / "run.db") as db:
        rows = np.concatenate(
            [np.frombuffer(zlib.decompress(data), NEW) for (data,) in db.execute("SELECT data FROM leases")]
        )
    return rows["granted_at"].min(), (rows["granted_at"] + rows["here_s"].astype(float)).max()


@pytest.mark.parametrize("query", ["from=x", "to=nan", "columns=inf", "from=1e300", "row=-x"])
def test_numbers_that_are_none_are_refused(staged, query):
    assert ask(a_server(staged)[0], f"/api/runs/staged/timeline?{query}")[0] == 400


@pytest.mark.parametrize(
    "query", ["from=-1e9&to=1e9", "from=5&to=1", "columns=1e9", "row=1e9", "rows=0", "from=3&to=3", "from=1e14&to=1e14"]
)
def test_windows_of_any_kind_are_answered(staged, query):
    assert found(a_server(staged)[0], f"/api/runs/staged/timeline?{query}")["leases"] == 4000


def test_bars_are_what_run_db_has(staged):
    app, _ = a_server(staged)
    tile = found(app, "/api/runs/staged/timeline?from=5&to=9")
    with sqlite3.connect(staged / "run.db") as db:
        rows = [np.frombuffer(zlib.decompress(data), NEW) for (data,) in db.execute("SELECT data FROM leases")]
    rows = np.concatenate(rows)
    began, ended = rows["granted_at"] - tile["origin"], rows["granted_at"] + rows["here_s"] - tile["origin"]
    expected = rows[(began < 9) & (ended > 5)]
    bars = tile["bars"]
    assert sorted(bars["lease"]) == sorted(expected["lease"].tolist())
    by_lease = dict(zip(bars["lease"], bars["at_s"], strict=True))
    for row in expected:
        at = by_lease[row["lease"]]
        assert len(at) == len(PARTS) + 1
        assert at == sorted(at)
        assert at[0] + tile["origin"] == pytest.approx(row["granted_at"], abs=1e-5)
        assert at[4] - at[3] == pytest.approx(row["compute_s"], abs=1e-5)
        assert at[6] - at[0] == pytest.approx(row["here_s"], abs=1e-5)


def test_what_is_summed_up_is_what_the_bars_say(staged):
    leases = leases_in(staged)
    began_at, ended_at = leases.span
    nodes = sorted(leases.amounts)
    with Reading(staged) as run:
        pixels = drawn(leases, Window(began_at, ended_at, 1000, nodes), run)
    assert pixels.shape == (17 * 5, 1000)
    rows, stations = leases.few_between(began_at, ended_at, 10_000)
    for i, node in enumerate(nodes):
        computed_s = (stations[:, 4] - stations[:, 3])[rows["node"] == node].sum()
        seen = (pixels[17 * i : 17 * i + 14] == 1).mean()  # of leases that overlap, no more than all of a moment
        assert seen <= computed_s / (ended_at - began_at) + 0.05
        assert seen > 0.3


def test_why_a_node_had_nothing_to_do_is_said(staged):
    tile = found(a_server(staged)[0], "/api/runs/staged/timeline?from=5&to=6")
    assert any("waited for version" in why for _, _, _, why in tile["gaps"])
    assert all(start < end for _, start, end, _ in tile["gaps"])


def test_leases_of_an_older_version_are_read(tmp_path):
    db = RunDb(tmp_path / "run.db")
    row = PACK(*(1, 2, 3, 1000.0, 4, 5, 6), *(0.5, 0.6, 0.7, 0.3, 0.1), *(0, 0), *(0.0, 0.0, 0.0))[: OLD.itemsize]
    db.insert_packed("leases", 1001.0, 13, '["raw"]', row * 13)  # as long as 11 new ones
    db.close()
    leases = leases_in(tmp_path)
    assert leases.count == 13
    rows, stations = leases.few_between(0.0, 2000.0, 100)
    assert rows["batches"].tolist() == [6] * 13
    assert np.isnan(rows["loss"]).all()
    assert stations[0] - 1000.0 == pytest.approx([0, 0.1, 0.1, 0.1, 0.4, 0.5, 0.6], abs=1e-6)


def test_damaged_leases_do_not_hide_the_others(tmp_path):
    db = RunDb(tmp_path / "run.db")
    good = PACK(*(1, 2, 3, 1000.0, 4, 5, 6), *(0.5, 0.6, 0.7, 0.3, 0.1), *(9, 9), *(0.0, 0.0, 0.0))
    wild = struct.pack("<qqqdiii5fBB3f", 1, 1, 1, float("nan"), 1, 1, 1, *[float("inf")] * 5, 0, 0, 0, 0, 0)
    db.insert_packed("leases", 1.0, 2, "not JSON", good + wild)
    db.insert_packed("leases", 1.0, 7, "[]", good)
    db.write("INSERT INTO leases VALUES (1, 1, '[]', ?)", [(b"not zlib",), (None,), ("text",)])
    db.close()
    assert leases_in(tmp_path).count == 1


def test_a_clock_that_is_set_back_does_not_hide_what_comes_after(tmp_path):
    db = RunDb(tmp_path / "run.db")
    for i, at in enumerate((5000.0, 5001.0, 1002.0, 1003.0)):  # set back by more than an hour
        row = PACK(*(i, 2, 3, at - 1, 4, 5, 6), *(0.5, 0.6, 0.7, 0.3, 0.1), *(0, 0), *(0.0, 0.0, 0.0))
        db.insert_packed("leases", at, 1, '["raw"]', row)
    db.close()
    leases = leases_in(tmp_path)
    assert leases.span == pytest.approx((4999.0, 5001.6))
    assert [chunk.rows["lease"].tolist() for chunk in leases.chunks] == [[0, 1, 2, 3]]


def test_a_run_in_the_place_of_another_is_read_from_its_beginning(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    leases = Leases()
    with Reading(folder) as run:
        leases.read(run)
        assert leases.count == 4000
    os.unlink(folder / "run.db")
    RunDb(folder / "run.db").close()
    with Reading(folder) as run:
        leases.read(run)
    assert leases.count == 0


def test_a_loss_that_has_no_room_is_none():
    book = Logbook()
    book.add(Answer(1, 1, 1, 0, 1, 1, 0.0, 0.0, 0.0, loss=1e300), Journey(0.1, 0.0, 0.1, 0.1))
    count, _, data = book.take()
    assert (count, len(data)) == (1, NEW.itemsize)
    assert np.isnan(np.frombuffer(data, NEW)["loss"][0])


def test_a_longer_run_in_the_place_of_another_is_not_mixed_with_it(staged, tmp_path):
    folder = tmp_path / "run"
    short = Staged(tmp_path / "short", nodes=2, leases_per_s=200.0)
    short.run(200)
    short.close()
    shutil.copytree(tmp_path / "short", folder)
    leases, run = Leases(), Followed(folder, "run")
    with Reading(folder) as reading:
        leases.read(reading)
    run.news()
    shutil.rmtree(folder)
    shutil.copytree(staged, folder)
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("UPDATE nodes SET joined_at = joined_at + 60")  # it was begun later
    with Reading(folder) as reading:
        leases.read(reading)
    assert leases.count == 4000
    assert run.news()["beginnings"] == 1


def test_leases_that_run_db_has_dropped_are_dropped_here_too(staged, monkeypatch):
    monkeypatch.setattr("wide.dashboard.leases.MOST_CHUNK", 100)
    monkeypatch.setattr("wide.dashboard.leases.MOST", 1000)
    leases = leases_in(staged)
    assert leases.count <= 1000
    assert leases.span == pytest.approx(leases_span_of_all(staged), abs=1e-6)


def test_the_first_moment_of_a_staged_run_is_where_it_should_be(staged):
    assert found(a_server(staged)[0], "/api/runs/staged/timeline")["origin"] == pytest.approx(BEGAN_AT, abs=0.2)


def test_who_was_not_there_was_not_idle(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("UPDATE nodes SET joined_at = ?, left_at = ? WHERE node = 3", (BEGAN_AT + 6, BEGAN_AT + 8))
        db.execute("UPDATE nodes SET left_at = NULL WHERE node != 3")
    tile = found(a_server(folder)[0], "/api/runs/run/timeline?from=5&to=1000")  # the run ends at 20 s
    tile |= found(a_server(folder)[0], "/api/runs/run/timeline?from=5&to=9")
    mine = [(start, end) for node, start, end, _ in tile["gaps"] if node == 3]
    shift = BEGAN_AT - tile["origin"]
    assert mine
    assert all(6 + shift - 1e-3 <= start < end <= 8 + shift + 1e-3 for start, end in mine)


def test_who_has_no_lease_in_view_was_idle_all_the_time(staged):
    app, _ = a_server(staged)
    tile = found(app, "/api/runs/staged/timeline?from=5&to=5.002")
    working = set(tile["bars"]["node"])
    for node in set(tile["nodes"]) - working:
        ((start, end),) = [(start, end) for whose, start, end, _ in tile["gaps"] if whose == node]
        assert (start, end) == (pytest.approx(5.0), pytest.approx(5.002))


def test_after_the_last_lease_nobody_is_idle(staged):
    tile = found(a_server(staged)[0], "/api/runs/staged/timeline?from=19&to=60")
    assert max(end for _, _, end, _ in tile["gaps"]) <= tile["last_s"] + 1e-6


def test_a_pause_is_called_one(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    with sqlite3.connect(folder / "run.db") as db:
        for at, words in (
            (6, "pause: paused"),
            (6.5, "pause: paused"),
            (7, "resume: the run goes on"),
            (19.5, "pause: x"),
        ):
            db.execute("INSERT INTO events VALUES (?, 'asked', NULL, ?)", (BEGAN_AT + at, words))
    tile = found(a_server(folder)[0], "/api/runs/run/timeline?from=5&to=9")
    shift = BEGAN_AT - tile["origin"]
    for _, start, end, why in tile["gaps"]:
        is_within = start > 6 + shift and end < 7 + shift
        is_without = end < 6 + shift or start > 7 + shift
        assert is_within <= ("paused" in why)
        assert is_without <= ("paused" not in why)
