"""What is seen of a run: screens of every size, lists, pages; of sound runs and of broken ones."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.staged import Staged
from tests.processes import result_of
from tests.test_track import JOB
from wide.cli.main import main
from wide.dashboard.account import account
from wide.dashboard.openmetrics import openmetrics
from wide.dashboard.report import report
from wide.dashboard.runs import listed, told
from wide.dashboard.screen import screen, spark
from wide.dashboard.svg import Curve, plot
from wide.dashboard.terminal import Screen, has_screen
from wide.dashboard.timeline import timeline
from wide.errors import UsageError
from wide.store import reading as reading_module
from wide.store.lock import FolderLock
from wide.store.reading import Reading, found
from wide.store.tidy import ROOM, tidy
from wide.telemetry.snapshot import Bins, Event, LinkView, NodeView, Recent, Snapshot
from wide.telemetry.totals import Part, Traffic, totals_of

EVIL = "\x1b[31m<script>alert(1)</script>\n"


def snapshot(nodes=4, name=lambda number: f"node-{number}", **more):
    views = []
    for number in range(1, nodes + 1):
        link = LinkView(2.5e6, 5e6, 0.01, {"gradient": "zstd", "weights": "lz4"}, {"raw": (0.1, 0.1)}, 20.0, 9)
        totals = totals_of(number, Part(name(number), 1, 100 * number), Traffic(rss_bytes=250_000_000))
        recent = Recent(12.5, 0.81, 0.1, 0.02, 0.07, 0.1)
        views.append(NodeView(totals, link, number == 3, 1, "a-machine", f"m{number}", 4, recent))
    events = tuple(Event(1e9 + i, "rejected", 1, f"stale: step {i} {EVIL}") for i in range(9))
    given = dict(at=1.0, strategy="sync", step=120, steps=400, batches=1000, loss=0.25, started_at=0.0, left_s=93.0)
    given |= dict(losses=tuple(2.0 / (i + 1) for i in range(60)), metrics={"accuracy": 0.9, "f1": None}, job="digits")
    given |= dict(batches_per_s=512.0, verdict="node 3's uplink limits the step " * 5, why_slow=("…",), events=events)
    return Snapshot(**(given | dict(nodes=tuple(views)) | more))


def drawn(run, width, height, phase=("", 0.0), **console):
    stream = io.StringIO()
    drawing = Console(file=stream, width=width, height=height, force_terminal=False, **console)
    drawing.print(screen(run, phase, 1.0, width, height))
    return stream.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 24), (40, 10), (20, 8), (200, 60)])
@pytest.mark.parametrize("nodes", [1, 4, 30, 1000])
def test_a_screen_of_any_size_is_not_overrun(width, height, nodes):
    lines = drawn(snapshot(nodes), width, height)
    assert len(lines) < height
    assert all(len(line) <= width for line in lines)
    assert "digits" in lines[0]


def test_a_screen_of_the_usual_size_has_everything():
    text = "\n".join(drawn(snapshot(), 120, 40))
    for words in (
        *("digits · sync, exact · 3 nodes on 3 machines · 1 silent", "93 s left", "step 120/400 · epoch 1"),
        *("512 batches/s", "loss 0.25 █", "accuracy 0.9", "f1 not finite"),
        *("3 node-3", "a-machine", "silent", "12.5", "30%", "20", "40", "zstd+lz4", "81%", "250 MB"),
        *("node 3's uplink limits the step", "rejected   node 1 stale: step 8"),
    ):
        assert words in text, words


def test_of_too_many_nodes_those_in_trouble_are_shown():
    lines = drawn(snapshot(1000), 80, 24)
    assert any(line.startswith("3 node-3") for line in lines)
    assert any("more" in line for line in lines)


def test_names_cannot_paint_the_screen():
    lines = drawn(snapshot(name=lambda number: EVIL), 80, 24)
    assert not any(character in "\n".join(lines) for character in "\x1b\r\x07")
    assert "[red]" in "\n".join(drawn(snapshot(name=lambda number: "[red]x"), 80, 24)), "nor is markup understood"


def test_before_the_first_step_there_is_one_line():
    assert drawn(Snapshot(0.0), 80, 24, ("opening the data set", -1.0)) == ["opening the data set (2 s)"]


def test_small_bars_follow_the_values():
    assert spark([1.0, 10.0, 100.0], 10) == "▁▅█"
    assert spark([0.0, 1.0], 10) == "▁█"
    assert spark([2.0, float("nan"), 2.0, float("inf")], 10) == "▁ ▁ "
    assert spark([], 10) == spark([1.0], 0) == ""


def test_colours_are_left_out_where_they_are_not_wanted(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    stream = io.StringIO()
    Console(file=stream, width=80, force_terminal=True).print(screen(snapshot(), ("", 0.0), 1.0, 80, 24))
    assert "\x1b[3" not in stream.getvalue()


def test_what_cannot_do_more_than_print_gets_lines(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert has_screen(Terminal(), is_plain=False)
    assert not has_screen(Terminal(), is_plain=True)
    assert not has_screen(io.StringIO(), is_plain=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not has_screen(Terminal(), is_plain=False)


def test_a_terminal_that_is_closed_ends_nothing():
    stream = io.StringIO()
    with Screen(stream) as display:
        display.show(snapshot(), ("", 0.0))
        stream.close()
        display.show(snapshot(), ("", 0.0))
        display.write("a word\n")


def test_part_of_a_line_waits_for_the_rest_of_it():
    stream = io.StringIO()
    with Screen(stream) as display:
        for text in ("50 %\r", "100 %", "\r", "and ", "another\nlast"):
            display.write(text)
    assert [line.strip() for line in stream.getvalue().splitlines() if line.strip()] == ["and another"]


# ── runs that are over, or go on ─────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    run = Staged(tmp_path_factory.mktemp("runs") / "20261118-000000-job", nodes=3, name=lambda number: f"n{number}")
    run.run(3000)
    run.close()
    return run.folder


def test_a_list_of_runs(finished):
    head, row = listed(finished.parent).splitlines()
    assert head.split() == ["run", "job", "strategy", "state", "steps", "loss", "metrics", "begun", "took"]
    assert row.split()[:5] == ["20261118-000000-job", "job", "sync", "done", "375"]
    assert "nothing not finite" in row


def test_one_run_in_words(finished):
    text = told(finished)
    assert "job: sync, exact, done" in text
    assert "command  wide run" in text
    assert "options  nodes 3, strategy sync" in text
    assert "last words: all steps done" in text
    assert "wide export" in text


def test_how_to_go_on_is_told(tmp_path):
    run = Staged(tmp_path / "run")
    run.run(100)
    run.close(state="interrupted", job={"file": "my job.py"})
    assert f"go on with: wide run 'my job.py' --resume {run.folder}" in told(run.folder)
    assert "interrupted" in listed(tmp_path)


def test_one_that_was_killed_is_told_from_one_that_goes_on(tmp_path):
    run = Staged(tmp_path / "run")
    run.run(100)
    run.close(state="running")
    assert account(run.folder).brief.state == "died"
    lock = FolderLock(run.folder)
    assert account(run.folder).brief.state == "running"
    assert "look at it: wide top" in told(run.folder)
    lock.close()


def test_a_page_about_a_run(finished):
    page = report([finished], "html")
    assert page.count("<svg") >= 6
    for words in (
        "Lease timeline",
        "data:image/png;base64,",
        "In numbers",
        "What happened",
        "wide run",
        "batches a node",
    ):
        assert words in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing comes from outside"


def test_names_are_only_text_in_a_page(tmp_path):
    run = Staged(tmp_path / "run", nodes=2, name=lambda number: EVIL)
    run.run(2000)
    run.close(why=EVIL, job={"file": f"{EVIL}.py"}, command=["wide", EVIL], options={"steps": EVIL})
    for text in (report([run.folder], "html"), report([run.folder, run.folder], "html")):
        assert "<script" not in text
    assert "&lt;script" in report([run.folder], "html")
    for text in (told(run.folder), listed(tmp_path), report([run.folder], "md")):
        assert "\x1b" not in text
    assert "\n<script" not in openmetrics(account(run.folder).brief, account(run.folder).snapshot)


def test_runs_side_by_side(finished, tmp_path):
    other = Staged(tmp_path / "other", nodes=2, leases_per_s=500)
    other.run(3000)
    other.close()
    page = report([finished, other.folder], "html")
    assert "2 runs" in page
    text = report([finished, other.folder], "md")
    row = next(line for line in text.splitlines() if line.startswith("| batches/s"))
    assert row.rstrip(" |").endswith("-50.0 %")
    assert "| --nodes | 3 | 2 |" in text


def test_a_report_as_data(finished):
    data = json.loads(report([finished], "json"))
    (run,) = data["runs"]
    assert data["schema"] == "wide.report/1"
    assert 3000 <= run["figures"]["batches"] < 3010
    assert run["metrics"] == {"accuracy": 0.5, "nothing": None}
    assert sum(node["batches"] for node in run["nodes"]) == run["figures"]["batches"]


def test_the_timeline_shows_how_each_node_spent_its_time(tmp_path):
    run = Staged(tmp_path / "run", nodes=3, leases_per_s=30)
    run.run(300)
    run.close()
    with Reading(run.folder) as reading:
        found = timeline(reading)
    assert found.png.startswith(b"\x89PNG")
    assert found.nodes == [1, 2, 3]
    assert found.height == 3 * 17
    assert 9.0 < found.ended_at - found.began_at < 11.0


def test_a_curve_with_gaps_and_one_without_points():
    picture = plot("loss", [Curve("a", [1, 2, 3, 4], [1.0, float("nan"), 2.0, 3.0])], "step")
    assert picture.count("<circle") == picture.count("<path") == 1
    assert "nothing to draw" in plot("loss", [Curve("a", [], [])], "step")
    assert "nothing to draw" in plot("loss", [Curve("a", [1], [float("inf")])], "step")
    assert plot("one", [Curve("a", [5], [0.0])], "step").count("<circle") == 1
    assert len(plot("many", [Curve("a", range(10**5), range(10**5))], "step")) < 20_000


def test_openmetrics(finished):
    run = account(finished)
    lines = openmetrics(run.brief, run.snapshot).splitlines()
    assert "wide_steps_total 375" in lines
    assert 'wide_metric{metric="accuracy"} 0.5' in lines
    assert 'wide_node_sent_bytes_total{node="1",name="n1",host="host-1"}' in " ".join(lines)
    assert not any('metric="nothing"' in line for line in lines), "what is not finite is left out"
    assert lines[-1] == "# EOF"


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_folder_without_a_run(tmp_path):
    for command in ("show", "report", "metrics", "top"):
        with pytest.raises(UsageError, match="there is no run in it"):
            _call(command, tmp_path)


def _call(command, folder):
    from wide.cli.main import _parser

    arguments = _parser().parse_args([command, str(folder)])
    return arguments.call(arguments)


@pytest.mark.parametrize("damage", ["text", "nothing", "half"])
def test_a_damaged_run_db(finished, tmp_path, damage, capsys):
    whole = (finished / "run.db").read_bytes()
    text = {"text": b"this is not a database, it is a text\n" * 99, "nothing": b"", "half": whole[: len(whole) // 2]}
    (tmp_path / "runs" / "broken").mkdir(parents=True)
    (tmp_path / "runs" / "broken" / "run.db").write_bytes(text[damage])
    code = main(["show", str(tmp_path / "runs" / "broken")])
    words = capsys.readouterr()
    assert (code, words.err.count("\n")) == (2, 1) if damage != "nothing" else code == 0
    if damage != "nothing":
        assert "damaged" in words.err
    assert "broken" in listed(tmp_path / "runs")


def test_a_newer_run(tmp_path):
    run = Staged(tmp_path / "run")
    run.close()
    with sqlite3.connect(run.folder / "run.db") as db:
        db.execute("PRAGMA user_version=99")
    with pytest.raises(UsageError, match="written by a newer version of wide"):
        account(run.folder)
    assert "cannot be read" in listed(tmp_path)


def test_a_run_of_an_older_version(tmp_path):
    run = Staged(tmp_path / "run")
    run.run(200)
    run.close()
    with sqlite3.connect(run.folder / "run.db") as db:
        for table in ("leases", "events", "live", "shape"):
            db.execute(f"DROP TABLE {table}")
        db.execute("PRAGMA user_version=0")
    assert account(run.folder).batches >= 200
    assert "In numbers" in report([run.folder], "html")


def test_a_snapshot_that_is_not_understood(tmp_path):
    run = Staged(tmp_path / "run")
    run.run(100)
    run.close()
    with sqlite3.connect(run.folder / "run.db") as db:
        db.execute('UPDATE live SET snapshot = \'{"at": "yesterday"}\'')
    assert account(run.folder).snapshot is None
    assert "In numbers" in report([run.folder], "html")


@pytest.mark.parametrize("story", ["", "{", "[]", '{"sessions": [3]}', '{"sessions": [{"options": 3, "job": 7}]}'])
def test_a_story_that_is_half_written(tmp_path, story):
    run = Staged(tmp_path / "run")
    run.run(100)
    run.close()
    (run.folder / "run.json").write_text(story)
    assert "100" in told(run.folder) or told(run.folder)
    assert report([run.folder], "html")


def test_a_run_that_is_being_written(tmp_path):
    run = Staged(tmp_path / "run")
    run.run(500)
    run.look()
    assert account(run.folder).brief.steps >= 0
    assert "In numbers" in report([run.folder], "html")
    run.close()


def test_thousands_of_runs(finished, tmp_path):
    for i in range(2000):
        (tmp_path / f"run-{i:05}").mkdir()
        os.link(finished / "run.db", tmp_path / f"run-{i:05}" / "run.db")
    lines = listed(tmp_path).splitlines()
    assert len(lines) == 32
    assert lines[-1] == "… and 1,970 older ones (--all)"


def test_where_there_are_no_runs(tmp_path):
    assert "no runs yet" in listed(tmp_path)
    with pytest.raises(UsageError, match="no such folder"):
        listed(tmp_path / "nowhere")


def test_a_page_goes_where_it_is_wanted(finished, tmp_path, capsys):
    assert main(["report", str(finished), "-o", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert main(["report", str(finished), "--format", "md"]) == 0
    assert capsys.readouterr().out.startswith("# 20261118-000000-job")
    assert main(["report", str(finished), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_one_look_at_a_run(finished, capsys):
    assert main(["top", str(finished), "--once"]) == 0
    assert capsys.readouterr().out == "done: all steps done\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wide.dashboard.account._state", lambda *_: "running")
        assert main(["top", str(finished), "--once"]) == 0
    assert capsys.readouterr().out.startswith("step 37")


def test_a_snapshot_without_numbers_is_drawn():
    assert drawn(replace(snapshot(), loss=None, losses=(float("nan"),), left_s=None, steps=None), 80, 24)


def test_runs_are_found_by_their_names(finished, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "one").symlink_to(finished)
    monkeypatch.chdir(tmp_path)
    assert found("one") == found("latest") == found("runs/one")
    assert found("two") == Path("two")


def test_what_old_rows_stand_for_counts(tmp_path):
    run = Staged(tmp_path / "run", nodes=2, batches_per_step=2, samples=64)
    run.run(400)
    run.close()
    before = account(run.folder)
    with contextlib.closing(sqlite3.connect(run.folder / "run.db", isolation_level=None)) as db:
        for _ in range(3):
            tidy(db, 350, ROOM._replace(steps=60, samples=20, leases=50, first_leases=10))
        assert db.execute("SELECT count(*) FROM steps").fetchone()[0] < 200
    after = account(run.folder)
    assert (after.brief.steps, after.samples, after.brief.loss) == (
        before.brief.steps,
        before.samples,
        before.brief.loss,
    )
    assert after.loss_first == pytest.approx(before.loss_first, rel=0.05)
    assert after.loss_last == pytest.approx(before.loss_last, rel=0.05)
    assert [node.totals.batches for node in after.nodes] == [node.totals.batches for node in before.nodes]


def test_a_run_in_a_folder_that_is_only_for_reading(tmp_path, monkeypatch):
    """What the writer had not put in its place yet is read, too."""
    run = Staged(tmp_path / "run")
    run.run(200)
    run.look()
    run._db.settle(10.0)
    connected = reading_module._connected

    def cannot(path):
        if path.parent == run.folder:
            raise sqlite3.OperationalError("unable to open database file")
        return connected(path)

    monkeypatch.setattr(reading_module, "_connected", cannot)
    assert account(run.folder).brief.steps > 0
    monkeypatch.undo()
    run.close()


@pytest.mark.parametrize("at", [1e17, -1e300, "soon", None, True])
def test_times_that_never_were(tmp_path, at):
    run = Staged(tmp_path / "runs" / "run")
    run.run(100)
    run.close(began_at=at)
    with sqlite3.connect(run.folder / "run.db") as db:
        db.execute("INSERT INTO events VALUES (1e300, 'joined', 1, 'x')")
    assert told(run.folder)
    assert listed(tmp_path / "runs")
    assert report([run.folder], "html")


def test_values_that_can_hardly_be_drawn():
    for values in ([-1.7e308, 1.7e308], [0.0, 5e-324], [1e299, -1e299], [1.0, 1.0 + 1e-16]):
        assert plot("x", [Curve("a", [1, 2], values)], "step")


def test_markdown_shows_names_as_they_are(tmp_path):
    run = Staged(tmp_path / "run", nodes=1, name=lambda number: "![](http://evil/x.png)|*_")
    run.run(100)
    run.close(why="<script>")
    text = report([run.folder], "md")
    assert "![](" not in text
    assert "<script" not in text


def test_few_points_of_a_long_series():
    bins = Bins(4)
    for i in range(1000):
        bins.add(float(i))
    assert 4 <= len(bins.means) <= 9
    assert bins.means[0] < 130 < 800 < bins.means[-1]


@pytest.mark.processes
@pytest.mark.parametrize("nodes", ["0", "2"])
def test_a_finished_run_is_counted_to_its_end(tmp_path, nodes):
    (tmp_path / "job.py").write_text(JOB)
    result = result_of("run", "job.py", "--nodes", nodes, "--steps", "123", "--out", "run", cwd=tmp_path)
    run = account(tmp_path / "run")
    assert (run.brief.steps, run.batches, run.samples) == (123, result["batches"], result["samples"])
    assert (run.loss_first, run.loss_last) == pytest.approx((result["loss_first"], result["loss_last"]))
    assert sum(node.totals.batches for node in run.nodes) == result["batches"]
    assert run.weights_sha256 == result["weights_sha256"]
