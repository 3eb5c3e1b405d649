"""What is shown of a run while it trains: in a terminal, a notebook, a pipe, and to the nodes."""

from __future__ import annotations

import io
import logging
import time

import pytest

from wide.dashboard import terminal
from wide.dashboard.progress import duration, line
from wide.dashboard.terminal import watching
from wide.node.inbox import _told
from wide.telemetry.contributions import Contributions
from wide.telemetry.lately import Lately, time_left
from wide.telemetry.log import logging_to
from wide.telemetry.snapshot import LinkView, NodeView, Snapshot, Window, decoded, encoded
from wide.telemetry.totals import Part, Traffic, totals_of
from wide.wire import messages as say


def node(number, batches=0, is_silent=False, travel_s=0.0):
    link = LinkView(1e6, 1e6, 0.01, {}, {"raw": (travel_s, 0.0)}, 10.0, 5)
    return NodeView(totals_of(number, Part(f"n{number}", 1, batches), Traffic()), link, is_silent, 1)


TWO = (node(1), node(2))


def seen(at=1.0, step=1, batches=10, nodes=TWO, **more):
    return Snapshot(
        at=at, steps=100, step=step, batches=batches, loss=0.5, started_at=0.0, elapsed_s=at, nodes=nodes, **more
    )


def test_speed_and_time_left_are_those_of_the_last_seconds():
    lately = Lately()
    for at in range(101):
        steps = at // 2 if at < 90 else 45 + 2 * (at - 90)
        pace = lately.count(float(at), steps, 10 * at if at < 90 else 900 + 40 * (at - 90), ())
    assert pace.batches_per_s == 40
    assert time_left(65, 100, pace.steps_per_s, None, 100.0) == 17.5


def test_a_pool_that_stands_still_is_not_fast():
    lately = Lately()
    for at in (1.0, 2.0, 3.0):
        pace = lately.count(at, int(at), int(100 * at), ())
    assert pace.batches_per_s == 100
    assert lately.count(11.0, 3, 300, ()).batches_per_s == 20


def test_a_nodes_time_is_told_in_parts():
    def totals(at):
        return totals_of(
            7, Part("n", 1, 10 * at), Traffic(0, 1000 * at, 0, 0.5 * at, 0.1 * at, 0.3 * at, 0, 0.2 * at, 0.1 * at)
        )

    lately = Lately()
    for at in range(1, 30):
        pace = lately.count(float(at), at, at, [totals(at)] if at > 20 else [])
    recent = pace.nodes[7]
    assert recent.batches_per_s == 10
    assert [round(part, 3) for part in recent[1:6]] == [0.5, 0.2, 0.1, 0.1, 0.2]
    assert recent.down_bytes_per_s == 1000


def test_silent_nodes_are_not_counted():
    assert "2 nodes" in line(seen(nodes=(node(1), node(2, is_silent=True), node(3))), ("", 0.0), 1.0)
    assert line(seen(nodes=(node(1), node(2, is_silent=True))), ("", 0.0), 1.0).endswith("1 node")


def test_before_training_it_says_what_is_being_done():
    assert line(Snapshot(0.0), ("opening the data set", 10.0), 135.0) == "opening the data set (125 s)"
    assert line(Snapshot(0.0), ("", 0.0), 135.0) == "0 nodes, waiting for the first update"


def test_time_left_is_by_steps_or_by_the_clock():
    assert time_left(50, 100, 5.0, 70.0, 20.0) == 10.0
    assert time_left(50, 100, 0.5, 70.0, 20.0) == 50.0
    assert time_left(50, 100, 0.0, 70.0, 80.0) == 0.0
    assert time_left(50, None, 5.0, None, 80.0) is None
    assert [duration(s) for s in (3, 119, 150, 9000)] == ["3 s", "119 s", "2 min", "2.5 h"]


def test_a_metric_that_is_not_finite_is_told_in_words():
    run = seen(metrics={"accuracy": None})
    assert line(run, ("", 0.0), 1.0).endswith("accuracy not finite")
    assert decoded(encoded(run)) == run


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(terminal, "FIRST_S", 0.01)
    monkeypatch.setattr(terminal, "OWN_REFRESH_S", 0.005)
    monkeypatch.setattr(terminal, "PIPED_S", 0.02)


def test_a_pipe_gets_lines_with_the_time(quick, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    window = Window()
    window.latest = seen(step=7)
    with logging_to("normal"), watching(window, is_wanted=True, is_plain=False):
        logging.getLogger("wide").info("somebody joined")
        deadline = time.monotonic() + 20.0
        while "step 7/100" not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.005)
    text = stream.getvalue()
    assert "\r" not in text
    assert any(line[8:].startswith(" step 7/100 · epoch 1 · loss 0.5") for line in text.splitlines())


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
