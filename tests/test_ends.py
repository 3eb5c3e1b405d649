"""How runs end: by signals, by deaths of parents, coordinators and nodes; nobody is left behind."""

from __future__ import annotations

import json
import os
import signal
import sqlite3

import psutil
import pytest

from tests.processes import relatives, result_of, started, until, wide
from tests.test_run import SLOW_LOSS, a_job

pytestmark = pytest.mark.processes

ENDLESS = "steps=10**9, loss=loss"


def an_endless_run(tmp_path, nodes=2):
    job = a_job(tmp_path, ENDLESS, SLOW_LOSS)
    return started("run", job, "--nodes", nodes, "--out", "here", cwd=tmp_path)


def has_steps(tmp_path):
    try:
        db = sqlite3.connect(f"file:{tmp_path / 'here' / 'run.db'}?mode=ro", uri=True)
        return db.execute("SELECT count(*) FROM steps").fetchone()[0] > 0
    except sqlite3.Error:
        return False


@pytest.mark.parametrize(
    ("number", "nodes"), [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGINT, 0), (signal.SIGTERM, 0)]
)
def test_a_signal_ends_the_run_cleanly(tmp_path, number, nodes):
    with an_endless_run(tmp_path, nodes) as process:
        assert until(lambda: has_steps(tmp_path))
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + number
    assert "interrupted after step" in err
    assert "Traceback" not in err
    assert (tmp_path / "here/checkpoints/latest").exists()


def test_ctrl_c_in_a_terminal_reaches_everybody_and_still_ends_cleanly(tmp_path):
    with an_endless_run(tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_training_began_ends_everything_too(tmp_path, number):
    body = "def slow():\n    time.sleep(60)\n    return points()"
    job = a_job(tmp_path, "dataset=slow", body)
    with started("run", job, "--nodes", 2, "--out", "here", cwd=tmp_path) as process:
        assert until(lambda: (tmp_path / "here/run.json").exists())
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (128 + number, "wide: interrupted before training began\n")


def test_no_process_outlives_a_killed_parent(tmp_path):
    with an_endless_run(tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        process.kill()
        assert until(lambda: not relatives(process.mark), seconds=20)


def test_no_process_outlives_a_killed_coordinator(tmp_path):
    with an_endless_run(tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        pids = coordinator_pids(process.pid)
        os.kill(pids[0], signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the coordinator process ended unexpectedly" in err


def coordinator_pids(parent):
    """The forkserver's child that has node children of its own."""
    family = psutil.Process(parent).children(recursive=True)
    return [member.pid for member in family if len(member.children()) == 2 and member.ppid() != parent]


def test_the_run_goes_on_when_a_node_is_killed_and_the_bits_stay_the_same(tmp_path):
    job = a_job(tmp_path, "steps=150, loss=loss", SLOW_LOSS)
    with started("run", job, "--nodes", 3, "--out", "here", "--json", cwd=tmp_path) as process:
        assert until(lambda: has_steps(tmp_path))
        (coordinator,) = [p for p in psutil.Process(process.pid).children(recursive=True) if len(p.children()) == 3]
        coordinator.children()[1].kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    result = json.loads(out)
    assert len(result["nodes"]) == 3
    alone = result_of("run", job, "--nodes", 0, cwd=tmp_path)
    assert result["weights_sha256"] == alone["weights_sha256"]
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    assert db.execute("SELECT count(*) FROM nodes WHERE why LIKE '%closed%' OR why LIKE '%broke%'").fetchone() == (1,)


def test_a_pool_whose_nodes_all_die_says_so(tmp_path):
    body = "def loss(model, batch):\n    os.kill(os.getpid(), signal.SIGKILL)"
    code, _, err = wide("run", a_job(tmp_path, "loss=loss", body), "--nodes", 2, "--log", "silent", cwd=tmp_path)
    assert code == 1
    assert "all nodes are gone" in err
