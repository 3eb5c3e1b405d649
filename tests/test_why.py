"""Why is it slow? Staged pools as snapshots, each with one thing in its way; and the same with real processes."""

from __future__ import annotations

import json
import sqlite3
from dataclasses import replace

import pytest

from tests.processes import wide
from wide.strategy.why import explained, possible, utilisation, verdict, why_slow
from wide.telemetry.snapshot import LinkView, NodeView, Recent, Snapshot, decoded
from wide.telemetry.totals import Part, Traffic, totals_of

GOOD = Recent(batches_per_s=95.0, compute=0.95, fetch=0.05, wait=0.03)


def node(number, rate=100.0, recent=GOOD, up_s=0.0, down_s=0.0, lossy=None, cores=4, machine=""):
    is_here = not up_s
    link = LinkView(1e9, 1e9, 0.001, {}, {"raw": (up_s, down_s)}, rate, 50, lossy if lossy is not None else {}, is_here)
    totals = totals_of(number, Part(f"n{number}", 1, 1000), Traffic())
    return NodeView(totals, link, False, 1, "box", machine or f"machine-{number}", cores, recent)


def pool(*nodes, **more):
    given = dict(
        at=100.0, strategy="sync", step=500, steps=1000, batches=4000, started_at=0.0, batches_per_step=16, nodes=nodes
    )
    rates = dict(batches_per_s=sum(view.recent.batches_per_s for view in nodes), steps_per_s=10.0)
    return Snapshot(**(given | rates | more))


def kinds(run):
    return [finding.kind for finding in why_slow(run)]


WAITS = GOOD._replace(batches_per_s=40.0, compute=0.4, wait=0.58)
WELL = pool(node(1), node(2))


def test_all_is_well():
    assert kinds(WELL) == []
    assert verdict(WELL) == "all is well: the pool does 95% of what its nodes can compute"


def test_a_slow_link():
    far = node(3, recent=WAITS, up_s=0.05, down_s=0.01, lossy={"int8": (0.012, 0.004)})
    run = pool(node(1, recent=WAITS), node(2, recent=WAITS), far)
    (finding,) = why_slow(run)
    assert finding.kind == "link"
    words = "node 3 (n3)'s uplink limits the step: updates and weights travel for 60% of it, and the others wait 58% of"
    assert finding.words.startswith(words)
    assert "; --compress auto would give about 1.9 × (not exact)" in finding.words


def test_a_link_that_carries_nothing_is_not_waited_for():
    far = node(3, recent=WAITS._replace(batches_per_s=0.0), up_s=5.0, down_s=5.0)
    assert kinds(pool(node(1), node(2), far)) == []


def test_a_slow_node():
    slow = node(3, rate=8.0, recent=GOOD._replace(batches_per_s=8.0))
    run = pool(node(1, recent=WAITS), node(2, recent=WAITS), slow, batches_per_step=4)
    (finding,) = why_slow(run)
    assert finding.kind == "node"
    assert "node 3 (n3) is 12.5 × slower than the others, and even one batch takes it 125% of a step" in finding.words
    assert "more batches_per_step" in finding.words


def test_slow_data():
    late = GOOD._replace(fetch=0.7)
    assert kinds(pool(node(1), node(2, recent=late))) == ["data"]
    assert verdict(pool(node(1), node(2, recent=late))).startswith("the data set limits node 2 (n2): 74% of")
    assert "limits all nodes" in verdict(pool(node(1, recent=late), node(2, recent=late)))


def test_too_many_nodes():
    turn = Recent(batches_per_s=19.0, compute=0.19, wait=0.8)
    run = pool(*(node(i, recent=turn, cores=2, machine="one") for i in range(1, 11)))
    assert kinds(run) == ["cores"]
    assert verdict(run).startswith("10 nodes share 2 cores of box: no more than that compute at a time")
    assert possible(run) == pytest.approx(200.0)
    assert utilisation(run) == pytest.approx(0.95)


def test_tiny_steps():
    tiny = Recent(batches_per_s=900.0, compute=0.3, wait=0.6)
    run = pool(node(1, 3000.0, tiny), node(2, 3000.0, tiny), busy=0.93, steps_per_s=112.5)
    assert kinds(run) == ["steps"]
    words = (
        "the work is cut very fine: a step is 2.67 ms of computing, and takes 8.89 ms; the coordinator is busy 93% of"
    )
    assert verdict(run).startswith(words)


def test_a_coordinator_that_is_busy_with_large_steps():
    run = pool(node(1, 30.0, WAITS), node(2, 30.0, WAITS), busy=0.7, steps_per_s=1.0, batches_per_s=16.0)
    assert kinds(run) == ["steps"]
    assert verdict(run).startswith("the coordinator is busy 70% of the time with messages, codecs and sums")


def test_slow_evaluation():
    run = replace(WELL, evaluating=0.4, evaluation_s=12.0)
    assert kinds(run) == ["evaluate"]
    assert verdict(run).startswith("evaluate() takes 12 s, and all nodes wait for it 40% of the time")


def test_a_slow_disk():
    assert kinds(replace(WELL, checkpoint_s=25.0)) == ["disk"]
    assert kinds(replace(WELL, rows_waiting=9000)) == ["disk"]
    assert "Training goes on beside it" in verdict(replace(WELL, rows_waiting=9000))


def test_fewer_batches_than_nodes():
    assert kinds(pool(node(1), node(2), node(3), node(4), batches_per_step=3)) == ["batches"]


def test_the_costliest_comes_first():
    run = pool(node(1, recent=GOOD._replace(fetch=0.5)), node(2), evaluating=0.2, checkpoint_s=60.0)
    assert kinds(run) == ["data", "evaluate", "disk"]


def test_nothing_is_said_before_there_is_something_to_say():
    assert explained(Snapshot(0.0)) == ((), "")
    assert explained(replace(WELL, step=2)) == ((), "")
    assert explained(replace(WELL, step=502, before=(500, 4000))) == ((), "")
    silent = WELL.nodes[0]._replace(is_silent=True)
    assert explained(replace(WELL, nodes=(silent,))) == ((), "")
    nothing = node(1, rate=0.0, recent=Recent())
    assert explained(pool(nothing, batches_per_s=0.0, steps_per_s=0.0)) == ((), "")


# ── with real processes ──────────────────────────────────────────────────────────────────────────────────────────────

JOB = """
import time, torch, wide
from torch import nn

class Data(torch.utils.data.Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i):
        {fetch}
        return torch.full((64,), i / 4096), i % 10

def loss(model, batch):
    {compute}
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

job = wide.Job(model=lambda: nn.Linear(64, 10), dataset=Data, loss=loss, batch_size={size}, batches_per_step={per_step},
    optimizer=lambda p: torch.optim.SGD(p, lr=0.01), steps=10**6, {more})
"""


def staged(tmp_path, nodes, fetch="pass", compute="pass", size=8, per_step=8, more="", seconds=6):
    """What the last snapshot of such a run says."""
    (tmp_path / "job.py").write_text(JOB.format(fetch=fetch, compute=compute, size=size, per_step=per_step, more=more))
    given = ("--nodes", nodes, "--seconds", seconds, "--out", "run", "--log", "silent")
    code, _, err = wide("run", "job.py", *map(str, given), cwd=tmp_path)
    assert code == 0, err
    with sqlite3.connect(tmp_path / "run" / "run.db") as db:
        return decoded(db.execute("SELECT snapshot FROM live").fetchone()[0])


@pytest.mark.processes
def test_a_data_set_that_sleeps_is_named(tmp_path):
    run = staged(tmp_path, 2, fetch="time.sleep(0.002)", compute="time.sleep(0.002)")
    assert run.verdict.startswith("the data set limits all nodes"), run.verdict


@pytest.mark.processes
def test_more_nodes_than_cores_are_named(tmp_path):
    run = staged(tmp_path, 8, compute="time.sleep(0.02)", per_step=16)
    assert any("8 nodes share" in words for words in run.why_slow), run.verdict


@pytest.mark.processes
def test_work_that_is_cut_very_fine_is_named(tmp_path):
    run = staged(tmp_path, 2, size=1, per_step=2)
    assert any(words.startswith("the work is cut very fine") for words in run.why_slow), run


@pytest.mark.processes
def test_a_pool_with_nothing_in_its_way_is_well(tmp_path):
    run = staged(tmp_path, 2, compute="time.sleep(0.03)", per_step=16)
    assert run.verdict.startswith("all is well"), run.verdict
    assert json.loads(json.dumps(run.why_slow)) == []
