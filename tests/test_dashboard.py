"""What the dashboard's server says, to whom, and what it makes of runs of every kind. No browser, no sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import shutil
import socket
import sqlite3
import struct
import threading
import zlib

import numpy as np
import pytest

from benchmarks.staged import BEGAN_AT, Staged
from wide.cli.main import _with_place
from wide.config import place_of, resolve
from wide.dashboard.doorkeeper import Doorkeeper
from wide.dashboard.following import GONE, Followed
from wide.dashboard.leases import NEW, OLD, PARTS, Leases
from wide.dashboard.serving import Limited
from wide.dashboard.stream import Stream
from wide.dashboard.timeline import Window, drawn
from wide.dashboard.web import Dashboard
from wide.errors import NotYet, UsageError
from wide.launch.dashboard import Place, Secrets, Steers, check, find_place, links_to, secret_of
from wide.launch.invites import Listening, revoke
from wide.launch.keys import keys_in, write_secret
from wide.store.reading import Reading
from wide.store.rundb import RunDb
from wide.telemetry.journey import PACK, Answer, Journey, Logbook

EVIL = "<script>alert(1)</script>\x1b[31m"
ADMIN, VIEWER = "the admin's", "the viewer's"


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A run of 20 seconds by 5 nodes, with names that want to do harm."""
    folder = tmp_path_factory.mktemp("runs") / "staged"
    run = Staged(folder, nodes=5, leases_per_s=200.0, name=lambda node: f"{EVIL}{node}")
    run.run(4000)
    run.close()
    return folder


class Steered:
    """What was asked of which run."""

    def __init__(self):
        self.asked = []

    def do(self, folder, what, node):
        if what == "fly":
            raise UsageError("nobody here knows how to do that")
        if what == "stop":
            raise NotYet("the run is not going on")
        self.asked.append((folder.name, what, node))
        return {"said": "done"}


def a_server(*folders, is_here=True, may_steer=True):
    secrets = {"admin": ADMIN} if is_here else {"viewer": VIEWER, "admin": ADMIN}
    doorkeeper, steered = Doorkeeper(is_here, may_steer, lambda: secrets), Steered()
    dashboard = Dashboard([Followed(folder, folder.name) for folder in folders], doorkeeper, steered, "1.0")
    return dashboard.app(), steered


def ask(app, path, method="GET", body=b"", **headers):
    """(status, headers, body) of one request, as uvicorn would bring it."""
    given = {"host": "127.0.0.1:9434"} | {name.replace("_", "-"): value for name, value in headers.items()}
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9434),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    said, parts = [], [body]

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # it stays on the line
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message):
        said.append(message)

    asyncio.run(app(scope, receive, send))
    data = b"".join(message.get("body", b"") for message in said)
    return said[0]["status"], {name.decode(): value.decode() for name, value in said[0]["headers"]}, data


def found(app, path, **headers):
    status, _, data = ask(app, path, **headers)
    assert status == 200, data
    return json.loads(data)


# ── who may look ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_on_this_machine_nobody_needs_a_secret_to_look(staged):
    app, _ = a_server(staged)
    assert found(app, "/api") == {"version": "1.0", "runs": ["staged"], "role": "viewer", "may_steer": False}
    assert found(app, "/api", authorization=f"Bearer {ADMIN}")["may_steer"]


@pytest.mark.parametrize("path", ["/api", "/api/runs/staged", "/api/stream", "/metrics", "/api/runs/staged/timeline"])
def test_beyond_it_everybody_does(staged, path):
    app, _ = a_server(staged, is_here=False)
    for wrong in ({}, {"authorization": "Bearer no"}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}):
        status, _, data = ask(app, path, **wrong)
        assert (status, b"secret" in data) == (401, True)
    if path != "/api/stream":
        assert ask(app, path, authorization=f"bearer {VIEWER}")[0] == 200


def test_the_page_itself_holds_no_data_and_needs_no_secret(staged):
    app, _ = a_server(staged, is_here=False)
    status, headers, data = ask(app, "/")
    assert (status, b"<main" in data, b"staged" in data) == (200, True, False)
    assert "default-src 'none'" in headers["content-security-policy"]
    assert ask(app, "/page/main.js")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9434", "", "127.0.0.1.evil.example", "10.0.0.1", "[::2]:1"]
)
def test_a_name_of_another_site_that_leads_here_is_refused(staged, host):
    app, _ = a_server(staged)
    assert ask(app, "/api", host=host)[0] == 421
    assert ask(app, "/", host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost:1", "127.0.0.1", "[::1]:9434", "dash.localhost", "127.9.9.9:80"])
def test_names_of_this_machine_are_not(staged, host):
    assert ask(a_server(staged)[0], "/api", host=host)[0] == 200


@pytest.mark.parametrize(
    "header",
    [
        {"origin": "http://evil.example"},
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"origin": "http://127.0.0.1:1"},
    ],
)
def test_what_another_site_asks_is_refused(staged, header):
    app, steered = a_server(staged)
    assert ask(app, "/api/runs/staged", **header)[0] == 403
    assert ask(app, "/api/runs/staged/control/pause", "POST", authorization=f"Bearer {ADMIN}", **header)[0] == 403
    assert not steered.asked


def test_what_our_own_page_asks_is_not(staged):
    app, _ = a_server(staged)
    assert ask(app, "/api", origin="http://127.0.0.1:9434", sec_fetch_site="same-origin")[0] == 200


# ── who may steer ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_only_an_admin_steers(staged):
    app, steered = a_server(staged, is_here=False)
    path = "/api/runs/staged/control/pause"
    assert ask(app, path, "POST")[0] == 401
    assert ask(app, path, "POST", authorization=f"Bearer {VIEWER}")[0] == 403
    assert ask(app, path, "POST", authorization="Bearer wrong")[0] == 401
    assert ask(app, path, authorization=f"Bearer {ADMIN}")[0] == 405
    assert not steered.asked
    status, _, data = ask(app, path, "POST", authorization=f"Bearer {ADMIN}")
    assert (status, json.loads(data)) == (200, {"said": "done"})
    assert steered.asked == [("staged", "pause", None)]


def test_without_control_nobody_does(staged):
    app, steered = a_server(staged, may_steer=False)
    status, _, data = ask(app, "/api/runs/staged/control/stop", "POST", authorization=f"Bearer {ADMIN}")
    assert (status, b"--control" in data, steered.asked) == (403, True, [])


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        *(
            ("pause", b"[1]", 400),
            ("pause", b"{", 400),
            ("drop", b'{"node": "x"}', 400),
            ("drop", b'{"node": -1}', 400),
        ),
        *(("pause", b" " * 5000, 413), ("fly", b"", 409), ("stop", b"", 409), ("drop", b'{"node": 3}', 200)),
    ],
)
def test_what_cannot_be_done_is_said(staged, path, body, status):
    app, _ = a_server(staged)
    found = ask(app, f"/api/runs/staged/control/{path}", "POST", body, authorization=f"Bearer {ADMIN}")
    assert found[0] == status
    assert "error" in json.loads(found[2]) or status == 200


def test_secrets_follow_from_the_pools_own_and_can_be_revoked(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    place = Place("0.0.0.0", 9434, control=True)
    looking, steering = links_to(place, folder)
    secrets = Secrets(place, folder)
    assert dict(secrets()) == {"viewer": secret_of(folder, "viewer"), "admin": secret_of(folder, "admin")}
    assert secrets()["viewer"] in looking
    assert looking.startswith("https://")
    assert secrets()["admin"] in steering
    before = secrets()["admin"]
    assert "is revoked" in revoke(folder, "admin")
    secrets._until = 0.0  # a moment later
    assert secrets()["admin"] != before
    assert secrets()["viewer"] in looking


def test_on_this_machine_a_link_needs_no_keys(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    assert links_to(Place("127.0.0.1", 9434), folder) == ["http://127.0.0.1:9434/"]
    assert not (folder / "secret").exists()


def test_an_invite_comes_with_a_picture(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    RunDb(folder / "run.db").close()
    with pytest.raises(UsageError, match="wide serve"):
        Steers().do(folder, "invite", None)
    keys_in(folder)
    listening = Listening("127.0.0.1", 9433, (("127.0.0.1", 9433),))
    write_secret(folder / "listening.json", json.dumps({"host": "", "port": 1, "addresses": listening.addresses}))
    told = Steers().do(folder, "invite", None)
    assert told["command"].startswith("wide join wide1_")
    assert told["qr"].startswith("data:image/svg+xml")


# ── where ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_where_a_dashboard_listens():
    assert place_of("auto") == ("127.0.0.1", None)
    assert place_of("9000") == ("127.0.0.1", 9000)
    assert place_of("0.0.0.0:9000") == ("0.0.0.0", 9000)
    assert place_of("[::1]:0") == ("::1", None)
    for wrong in ("job.py", "70000", "-1", "example.org:80", "1.2.3:4", ":", "9000x", "²"):
        with pytest.raises(UsageError, match="expected PORT"):
            place_of(wrong)


def test_a_port_is_not_a_job():
    assert _with_place(["run", "--dashboard", "job.py"]) == ["run", "--dashboard=auto", "job.py"]
    assert _with_place(["run", "job.py", "--dashboard"]) == ["run", "job.py", "--dashboard=auto"]
    assert _with_place(["run", "--dashboard", "0.0.0.0:80", "job.py"])[1:3] == ["--dashboard", "0.0.0.0:80"]
    assert _with_place(["--dashboard", "9000", "j"]) == ["--dashboard", "9000", "j"]
    assert resolve({"dashboard": True}, {}).dashboard == "auto"


def test_a_port_in_use_is_told_before_anything_begins():
    place, listener = find_place("0", control=False)
    with listener, pytest.raises(UsageError, match="choose another PORT"):
        find_place(str(place.port), control=False)


def test_control_without_a_dashboard_is_a_mistake():
    with pytest.raises(UsageError, match="--dashboard"):
        check(resolve({"control": True}, {}))


# ── what is said ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_told_of_with_all_that_a_page_shows(staged):
    app, _ = a_server(staged)
    path = "/api/runs/staged"
    about = found(app, path)
    assert (about["state"], about["batches"] > 3000, len(about["nodes"])) == ("done", True, 5)
    assert "\x1b" not in json.dumps(about)
    curves = found(app, "/api/runs/staged/curves?points=50")
    losses = curves["losses"]
    assert len(losses["step"]) == 50
    assert all(
        low <= loss <= high for low, loss, high in zip(losses["low"], losses["loss"], losses["high"], strict=True)
    )
    assert (
        losses["step"][-1] == about["batches"] // 10 + about["batches"] // 320 - 400 // 32 or losses["step"][-1] > 390
    )
    assert set(curves["evaluations"]) == {"accuracy", "nothing"}
    assert curves["evaluations"]["nothing"]["value"] == [None]
    near = found(app, "/api/runs/staged/curves?points=50&from=100&to=120")["losses"]
    assert (near["step"][0], near["step"][-1]) == (100, 120)
    series = found(app, "/api/runs/staged/series")
    assert set(series["nodes"]) == {"1", "2", "3", "4", "5"}
    assert 150 < np.mean(np.sum(list(series["nodes"].values()), axis=0)) < 250
    node = found(app, "/api/runs/staged/nodes/3")
    assert node["events"][0][1] == "joined"
    assert len(node["rates"]["batches"]) == len(node["seconds"])
    assert found(app, "/api/runs/staged/events")["events"][-1][2] == "joined"
    assert ask(app, "/metrics")[2].decode().endswith("# EOF\n")


@pytest.mark.parametrize("query", ["from=x", "to=nan", "columns=inf", "from=1e300", "row=-x"])
def test_numbers_that_are_none_are_refused(staged, query):
    assert ask(a_server(staged)[0], f"/api/runs/staged/timeline?{query}")[0] == 400


@pytest.mark.parametrize(
    "query", ["from=-1e9&to=1e9", "from=5&to=1", "columns=1e9", "row=1e9", "rows=0", "from=3&to=3", "from=1e14&to=1e14"]
)
def test_windows_of_any_kind_are_answered(staged, query):
    assert found(a_server(staged)[0], f"/api/runs/staged/timeline?{query}")["leases"] == 4000


@pytest.mark.parametrize(
    "path", ["/api/runs/other", "/api/runs/..%2f", "/page/../web.py", "/page/%2e%2e/web.py", "/metrics?run=x"]
)
def test_what_is_not_there_is_not_found(staged, path):
    assert ask(a_server(staged)[0], path)[0] == 404


def test_news_are_what_is_new(staged):
    run = Followed(staged, "staged")
    first, second = run.news(), run.news()
    assert first["losses"][-1][0] == len(
        found(a_server(staged)[0], "/api/runs/staged/curves?points=4000")["losses"]["step"]
    )
    assert len(first["losses"]) < 100
    assert second["losses"] == []
    json.dumps(first)


def test_a_run_that_goes_back_to_a_checkpoint_begins_anew(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    run = Followed(folder, "run")
    run.news()
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("DELETE FROM steps WHERE step >= 100")
    told = run.news()
    assert (told["beginnings"], told["losses"][-1][0]) == (1, 100)


def test_a_run_that_is_deleted_is_said_to_be_gone(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    app, _ = a_server(folder)
    assert ask(app, "/api/runs/run")[0] == 200
    run = Followed(folder, "run")
    shutil.rmtree(folder)
    assert run.news()["state"] == GONE
    assert ask(app, "/api/runs/run/timeline")[0] == 410


# ── leases ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def leases_in(folder):
    leases = Leases()
    with Reading(folder) as run:
        leases.read(run)
    return leases


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


# ── the stream ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Reader:
    """Takes what it is sent, until it hangs up; or takes nothing at all."""

    def __init__(self, messages=2, reads=True):
        self._left, self._reads = messages, reads
        self.said, self._gone = [], asyncio.Event()

    async def receive(self):
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if not self._reads:
            await asyncio.Event().wait()
        if message.get("body", b"").startswith(b"data: "):
            self.said.append(json.loads(message["body"][6:]))
            if len(self.said) == self._left:
                self._gone.set()


def test_many_readers_are_told_what_was_found_once(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 0.01)
    looks = []

    async def main():
        stream = Stream(lambda: looks.append(threading.get_ident()) or [{"run": len(looks)}])
        readers = [Reader() for _ in range(50)]
        stuck = [asyncio.create_task(stream.tell(r.receive, r.send, lambda: True)) for r in [Reader(reads=False)] * 20]
        await asyncio.gather(*(stream.tell(reader.receive, reader.send, lambda: True) for reader in readers))
        for task in stuck:
            task.cancel()
        await asyncio.gather(*stuck, return_exceptions=True)
        assert all(reader.said[0] == readers[0].said[0] for reader in readers)
        assert stream._listeners == 0
        await stream._task

    asyncio.run(main())
    assert 2 <= len(looks) < 20
    assert threading.get_ident() not in looks  # the loop never reads a database


def test_a_reader_that_is_stuck_is_let_go_of(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.STUCK_S", 0.01)

    async def main():
        reader = Reader(reads=False)
        await asyncio.wait_for(Stream(list).tell(reader.receive, reader.send, lambda: True), 10)

    asyncio.run(main())


def test_who_may_not_look_any_more_hears_nothing_more(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 0.01)

    async def main():
        reader, may = Reader(messages=1000), [True, True, False]
        await asyncio.wait_for(Stream(list).tell(reader.receive, reader.send, lambda: may.pop(0)), 10)
        assert len(reader.said) <= 3

    asyncio.run(main())


def test_last_words_reach_everybody(monkeypatch):
    monkeypatch.setattr("wide.dashboard.stream.EVERY_S", 100.0)

    async def main():
        stream, reader = Stream(lambda: [{"run": "x"}]), Reader(messages=1000)
        telling = asyncio.create_task(stream.tell(reader.receive, reader.send, lambda: True))
        while not reader.said:
            await asyncio.sleep(0)
        await stream.finish()
        await asyncio.wait_for(telling, 10)
        assert [told["is_last"] for told in reader.said] == [False, True]

    asyncio.run(main())


def test_a_run_with_nonsense_in_it_silences_nobody(staged, tmp_path):
    folder = shutil.copytree(staged, tmp_path / "run")
    with sqlite3.connect(folder / "run.db") as db:
        db.execute("INSERT INTO steps VALUES (100000, 0, 'abc', 'x', 'y', 0)")
    assert Followed(folder, "run").news()["state"] == GONE
    status, headers, _ = ask(a_server(folder)[0], "/api/runs/run/curves")
    assert (status, "content-security-policy" in headers) == (410, True)


@pytest.mark.parametrize("node", ["9" * 4400, "-1", "x", "²", "1e3"])
def test_a_node_that_cannot_be_is_not_found(staged, node):
    assert ask(a_server(staged)[0], f"/api/runs/staged/nodes/{node}")[0] == 404


def test_what_we_did_wrong_is_told_but_not_without_end(staged, capsys, monkeypatch):
    monkeypatch.setattr(Followed, "events", lambda self: 1 / [].index(0))
    monkeypatch.setattr("wide.dashboard.web.UNREADABLE", ())
    app, _ = a_server(staged)
    for _ in range(30):
        status, headers, data = ask(app, "/api/runs/staged/events")
        assert (status, "error" in json.loads(data), "content-security-policy" in headers) == (500, True, True)
    assert capsys.readouterr().err.count("Traceback") == 20


def test_a_listener_lets_in_so_many_and_the_oldest_goes(monkeypatch):
    monkeypatch.setattr("wide.dashboard.serving.MOST_CONNECTIONS", 3)
    with Limited(socket.create_server(("127.0.0.1", 0))) as listener:
        callers, inside = [], []
        for _ in range(5):
            callers.append(socket.create_connection(listener.getsockname()))
            inside.append(listener.accept()[0])
        for caller in callers[:2]:
            caller.settimeout(10)
            assert caller.recv(1) == b""
        inside[2].close()  # one that is closed makes room
        callers.append(socket.create_connection(listener.getsockname()))
        inside.append(listener.accept()[0])
        for caller in callers[3:]:
            caller.setblocking(False)
            with pytest.raises(BlockingIOError):
                caller.recv(1)
        for line in (*callers, *inside):
            line.close()


def test_whoever_is_gone_is_not_answered_and_too_many_are_not_heard(staged, monkeypatch):
    monkeypatch.setattr("wide.dashboard.web.MOST_ASKED", 0)
    assert ask(a_server(staged)[0], "/api/runs/staged")[0] == 503


def test_an_answer_that_nobody_takes_is_given_up(staged, monkeypatch):
    monkeypatch.setattr("wide.dashboard.web.TAKE_S", 0.01)
    app, taken = a_server(staged)[0], []
    scope = {"type": "http", "method": "GET", "path": "/api/runs/staged/curves", "query_string": b"", "headers": []}
    scope |= {"headers": [(b"host", b"localhost")], "http_version": "1.1", "scheme": "http", "root_path": ""}

    async def send(message):
        taken.append(message)
        await asyncio.Event().wait()

    async def receive():
        await asyncio.Event().wait()

    asyncio.run(asyncio.wait_for(app(scope, receive, send), 10))
    assert len(taken) == 1


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


def leases_span_of_all(folder):
    with sqlite3.connect(folder / "run.db") as db:
        rows = np.concatenate(
            [np.frombuffer(zlib.decompress(data), NEW) for (data,) in db.execute("SELECT data FROM leases")]
        )
    return rows["granted_at"].min(), (rows["granted_at"] + rows["here_s"].astype(float)).max()


def test_the_page_may_be_linked_to_from_anywhere(staged):
    app, _ = a_server(staged)
    assert ask(app, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert ask(app, "/api", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 403


def test_answers_are_compressed_for_who_understands_it(staged):
    _, headers, data = ask(a_server(staged)[0], "/api/runs/staged/curves", accept_encoding="gzip, br")
    assert headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(data))["losses"]["step"]


def test_the_first_moment_of_a_staged_run_is_where_it_should_be(staged):
    assert found(a_server(staged)[0], "/api/runs/staged/timeline")["origin"] == pytest.approx(BEGAN_AT, abs=0.2)
