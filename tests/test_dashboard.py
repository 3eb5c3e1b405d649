"""What the dashboard's server says, to whom, and what it makes of runs of every kind. No browser, no sockets."""

from __future__ import annotations

import gzip
import json
import shutil
import sqlite3

import numpy as np
import pytest

from tests.dashboards import ADMIN, VIEWER, a_server, ask, found
from wide.cli.main import _with_place
from wide.config import place_of, resolve
from wide.dashboard.following import GONE, Followed
from wide.errors import UsageError
from wide.launch.dashboard import Place, Secrets, Steers, check, find_place, links_to, secret_of
from wide.launch.invites import Listening, revoke
from wide.launch.keys import keys_in, write_secret
from wide.store.rundb import RunDb


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
    with listener, pytest.raises(UsageError, match="choose another place"):
        find_place(str(place.port), control=False)


def test_control_without_a_dashboard_is_a_mistake():
    with pytest.raises(UsageError, match="--dashboard"):
        check(resolve({"control": True}, {}))


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
    monkeypatch.setattr("wide.dashboard.answers.UNREADABLE", ())
    app, _ = a_server(staged)
    for _ in range(30):
        status, headers, data = ask(app, "/api/runs/staged/events")
        assert (status, "error" in json.loads(data), "content-security-policy" in headers) == (500, True, True)
    assert capsys.readouterr().err.count("Traceback") == 20


def test_whoever_is_gone_is_not_answered_and_too_many_are_not_heard(staged, monkeypatch):
    monkeypatch.setattr("wide.dashboard.answers.MOST_ASKED", 0)
    assert ask(a_server(staged)[0], "/api/runs/staged")[0] == 503


def test_the_page_may_be_linked_to_from_anywhere(staged):
    app, _ = a_server(staged)
    assert ask(app, "/", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 200
    assert ask(app, "/api", sec_fetch_site="cross-site", sec_fetch_mode="navigate")[0] == 403


def test_answers_are_compressed_for_who_understands_it(staged):
    _, headers, data = ask(a_server(staged)[0], "/api/runs/staged/curves", accept_encoding="gzip, br")
    assert headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(data))["losses"]["step"]
