"""What is shown of a run while it trains: in a terminal, a notebook, a pipe, and to the nodes."""

from __future__ import annotations

import io
import logging
import time

import pytest

from wide.dashboard import terminal
from wide.dashboard.progress import Progress, duration, time_left
from wide.dashboard.terminal import LivingLine, watching
from wide.node.inbox import _told
from wide.telemetry.contributions import Contributions
from wide.telemetry.log import logging_to
from wide.telemetry.snapshot import LinkView, NodeView, Snapshot, Window
from wide.telemetry.totals import Part, Traffic, totals_of
from wide.wire import messages as say


def node(number, batches=0, is_silent=False, travel_s=0.0):
    link = LinkView(1e6, 1e6, 0.01, {}, {"raw": (travel_s, 0.0)}, 10.0, 5)
    return NodeView(totals_of(number, Part(f"n{number}", 1, batches), Traffic()), link, is_silent, 1)


TWO = (node(1), node(2))


def seen(window, at, step, batches, nodes=TWO, **more):
    window.latest = Snapshot(
        at=at, steps=100, step=step, batches=batches, loss=0.5, started_at=0.0, elapsed_s=at, nodes=nodes, **more
    )


def test_speed_and_time_left_are_those_of_the_last_seconds():
    window = Window()
    progress = Progress(window)
    for at in range(101):
        seen(
            window, float(at), at // 2 if at < 90 else 45 + 2 * (at - 90), 10 * at if at < 90 else 900 + 40 * (at - 90)
        )
        progress.see()
    line = progress.line(100.0)
    assert "40 batches/s" in line
    assert "18 s left" in line  # 35 of 100 steps are left, at 2 a second


def test_a_pool_that_stands_still_is_not_fast():
    window = Window()
    progress = Progress(window)
    for at in (1.0, 2.0, 3.0):
        seen(window, at, int(at), int(100 * at))
        progress.see()
    assert "100 batches/s" in progress.line(3.0)
    assert "20 batches/s" in progress.line(11.0)


def test_silent_nodes_are_not_counted():
    window = Window()
    seen(window, 1.0, 1, 10, nodes=(node(1), node(2, is_silent=True), node(3)))
    assert "2 nodes" in Progress(window).line(1.0)
    seen(window, 1.0, 1, 10, nodes=(node(1), node(2, is_silent=True)))
    assert "1 node ·" in Progress(window).line(1.0)


def test_before_training_it_says_what_is_being_done():
    window = Window()
    window.phase = ("opening the data set", 10.0)
    assert Progress(window).line(135.0) == "opening the data set (125 s)"
    window.phase = ("", 0.0)
    assert Progress(window).line(135.0) == "0 nodes, waiting for the first update"


def test_time_left_is_by_steps_or_by_the_clock():
    run = Snapshot(at=0.0, steps=100, step=50, seconds=70.0, started_at=0.0)
    assert time_left(run, 5.0, 20.0) == 10.0
    assert time_left(run, 0.5, 20.0) == 50.0
    assert time_left(run, 0.0, 80.0) == 0.0
    assert [duration(s) for s in (3, 119, 150, 9000)] == ["3 s", "119 s", "2 min", "2.5 h"]


def test_a_living_line_is_written_over_and_log_lines_go_above_it():
    stream = io.StringIO()
    line = LivingLine(stream)
    line.show("step 1 of many")
    line.show("step 2")
    line.write("a word\n")
    line.show("")
    assert screen(stream.getvalue()) == ["a word", ""]
    assert stream.getvalue().endswith("step 2\r      \r")


def screen(text):
    """What a terminal, or a notebook's cell, would show."""
    lines = [""]
    column = 0
    for character in text:
        if character == "\n":
            lines.append("")
            column = 0
        elif character == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + character + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(terminal, "FIRST_S", 0.01)
    monkeypatch.setattr(terminal, "REFRESH_S", 0.005)
    monkeypatch.setattr(terminal, "PIPED_S", 0.02)
    monkeypatch.setattr(terminal, "NOTEBOOK_S", 0.02)


def shown(stream, monkeypatch, words, is_notebook=False):
    """Watch a run until these words are there."""
    stream.is_notebook = is_notebook
    monkeypatch.setattr("sys.stderr", stream)
    window = Window()
    seen(window, 1.0, 7, 70)
    with logging_to("normal"), watching(window, True):
        logging.getLogger("wide").info("somebody joined")
        deadline = time.monotonic() + 20.0
        while words not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    return stream.getvalue()


def test_a_pipe_gets_lines_with_the_time(quick, monkeypatch):
    text = shown(io.StringIO(), monkeypatch, "step 7/100")
    assert "\r" not in text
    assert any(line[8:].startswith(" step 7/100 · epoch 1 · loss 0.5") for line in text.splitlines())


def test_a_notebook_gets_one_line_that_lives_and_then_goes(quick, monkeypatch):
    text = shown(io.StringIO(), monkeypatch, "\rstep 7/100", is_notebook=True)
    assert screen(text)[-1] == ""
    assert "somebody joined" in screen(text)[0]


def test_a_node_that_contributes_nothing_is_named_once_with_the_reason():
    contributions = Contributions()
    pool = dict(steps=1000, started_at=0.0)
    assert contributions.look(Snapshot(at=0.0, step=0, nodes=(node(1), node(2, travel_s=9.0)), **pool)) == ([], [])
    later = Snapshot(at=40.0, step=100, batches=400, nodes=(node(1, 400), node(2, travel_s=9.0)), **pool)
    told, useless = contributions.look(later)
    assert [(one.node, one.batches, one.per_s) for one in told] == [(1, 400, 10.0), (2, 0, 0.0)]
    (words,) = useless
    assert "node 2 (n2) has contributed nothing for 40 s: an update and new weights travel 9 s" in words
    again = Snapshot(at=80.0, step=200, batches=800, nodes=(node(1, 800), node(2, travel_s=9.0)), **pool)
    assert contributions.look(again)[1] == []


def test_one_that_is_silent_or_too_slow_is_told_apart():
    contributions = Contributions()
    contributions.look(Snapshot(at=0.0, started_at=0.0, nodes=(node(1), node(2), node(3))))
    nodes = (node(1, 400), node(2, is_silent=True), node(3))
    _, (silent, slow) = contributions.look(Snapshot(at=40.0, step=100, batches=400, started_at=0.0, nodes=nodes))
    assert silent.endswith("it is silent")
    assert "the others are done before it is" in slow


def test_in_a_pool_that_stands_still_nobody_is_blamed():
    contributions = Contributions()
    contributions.look(Snapshot(at=0.0, started_at=0.0, nodes=(node(1),)))
    assert contributions.look(Snapshot(at=40.0, started_at=0.0, nodes=(node(1),)))[1] == []


def test_what_a_node_is_told_of_itself():
    words = _told(say.Progress(step=120, steps=400, left_s=240.4, batches=2048, yours=512, per_s=85.0))
    assert words == "step 120/400 · this node: 512 of 2048 batches (25%), 85 a second · 240 s left"
