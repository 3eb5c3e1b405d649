"""Every strategy with real processes on real sockets: each batch once, whoever dies; `auto`, `wide plan`, and bad input."""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from contextlib import closing

import psutil
import pytest

from tests.processes import result_of, started, until, wide
from tests.test_run import CONVNET, DIGITS, SLOW_LOSS, a_job
from tests.test_serve import address_of, query, token_of

pytestmark = pytest.mark.processes

STRATEGIES = ("async", "local")


def batches_by_epoch(folder):
    """How often each batch of each epoch is in the ledger: {epoch: {batch: times}}."""
    with closing(sqlite3.connect(folder / "run.db")) as db:
        rows = db.execute("SELECT epoch, first_batch, last_batch FROM ledger JOIN steps USING (step)").fetchall()
    found: dict[int, Counter[int]] = {}
    for epoch, first, last in rows:
        found.setdefault(epoch, Counter()).update(range(first, last + 1))
    return found


def assert_each_once(folder, epochs, batches):
    found = batches_by_epoch(folder)
    assert sorted(found) == list(range(epochs))
    for epoch, counted in found.items():
        assert counted == dict.fromkeys(range(batches), 1), f"epoch {epoch}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("options", [(), ("--data", "stream", "--compress", "int4")], ids=["raw", "streamed in int4"])
def test_each_batch_of_an_epoch_is_merged_exactly_once(tmp_path, strategy, options):
    arguments = ("--strategy", strategy, "--nodes", 3, "--epochs", 6, "--out", "here", *options)
    result = result_of("run", DIGITS, *arguments, cwd=tmp_path)
    assert (result["strategy"], result["steps"], result["batches"]) == (strategy, 18, 6 * 45)
    assert result["samples"] == 6 * 1437 == sum(node["samples"] for node in result["nodes"])
    assert_each_once(tmp_path / "here", 6, 45)
    with closing(sqlite3.connect(tmp_path / "here" / "run.db")) as db:
        assert [step for (step,) in db.execute("SELECT step FROM steps")] == list(range(18))


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_digits_are_learned_in_every_strategy(tmp_path, strategy):
    result = result_of("run", DIGITS, "--strategy", strategy, "--nodes", 4, cwd=tmp_path)
    assert result["metrics"]["accuracy"] > 0.94
    assert result["loss_last"] < 0.15


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_dropout_scheduler_and_clipping_work_in_every_strategy(tmp_path, strategy):
    result = result_of("run", CONVNET, "--strategy", strategy, "--nodes", 2, "--steps", 12, cwd=tmp_path)
    assert result["steps"] == 12
    assert result["loss_last"] < result["loss_first"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_is_lost_when_a_node_is_killed(tmp_path, strategy):
    job = a_job(tmp_path, "epochs=40, loss=loss", SLOW_LOSS)
    arguments = ("run", job, "--strategy", strategy, "--nodes", 3, "--out", "here", "--json")
    with started(*arguments, cwd=tmp_path) as process:
        assert until(lambda: query(tmp_path, "SELECT step FROM steps"))
        (coordinator,) = [p for p in psutil.Process(process.pid).children(recursive=True) if len(p.children()) == 3]
        coordinator.children()[1].kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert json.loads(out)["batches"] == 40 * 11
    assert_each_once(tmp_path / "here", 40, 11)


@pytest.mark.parametrize("strategy", ["sync", *STRATEGIES])
def test_more_nodes_than_batches_is_no_problem(tmp_path, strategy):
    job = a_job(tmp_path, "dataset=lambda: points(9), steps=4, batches_per_step=2")
    code, out, err = wide("run", job, "--strategy", strategy, "--nodes", 5, "--json", cwd=tmp_path)
    assert (code, json.loads(out)["steps"]) == (0, 4), err


@pytest.mark.parametrize("nodes", [0, 2])
def test_a_diverging_run_ends_with_a_clear_line_and_keeps_its_weights(tmp_path, nodes):
    body = "def loss(model, batch):\n    return sum(p.square().sum() for p in model.parameters())"
    job = a_job(tmp_path, "steps=4000, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=1.02)", body)
    code, _, err = wide("run", job, "--nodes", nodes, "--out", "here", "--log", "silent", cwd=tmp_path)
    assert code == 1
    assert "training diverges: the loss began at" in err
    assert "what was trained until step" in err
    assert (tmp_path / "here/checkpoints/latest").exists()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_the_users_code_raises_is_told_with_its_line_in_every_strategy(tmp_path, strategy):
    body = "def loss(model, batch):\n    raise ValueError('bad batch')"
    code, _, err = wide("run", a_job(tmp_path, "loss=loss", body), "--strategy", strategy, "--nodes", 2, cwd=tmp_path)
    assert code == 1
    assert "ValueError: bad batch (small.py:8 in loss)" in err
    assert ", batch " in err


def test_an_optimizer_that_needs_a_closure_is_explained_in_local_training_too(tmp_path):
    job = a_job(tmp_path, "optimizer=lambda params: torch.optim.LBFGS(params)")
    code, _, err = wide("run", job, "--strategy", "local", "--nodes", 1, cwd=tmp_path)
    assert code == 1
    assert "LBFGS" in err
    assert "closure" in err


def test_a_plan_is_made_for_this_machine(tmp_path):
    code, out, err = wide("plan", DIGITS, "--nodes", 2, "--json", cwd=tmp_path)
    assert code == 0, err
    plan = json.loads(out)
    assert plan["schema"] == "wide.plan/1"
    assert plan["strategy"] in plan["forecasts"].keys() == {"sync", "async", "local"}
    assert plan["batches_per_s"] == plan["forecasts"][plan["strategy"]]["batches_per_s"] > 0
    assert len(plan["nodes"]) == 2
    assert f"--strategy {plan['strategy']}: " in err
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_running_pool_can_be_asked_for_its_plan(tmp_path):
    job = a_job(tmp_path, "steps=10**9, loss=loss", SLOW_LOSS)
    with started("serve", job, "--port", 0, "--out", "here", cwd=tmp_path) as process:
        address = address_of(process, tmp_path)
        token = {"WIDE_TOKEN": token_of(tmp_path)}
        code, _, err = wide("plan", address, cwd=tmp_path, **token)
        assert (code, "not all were measured yet" in err) == (75, True)
        code, _, err = wide("plan", address, cwd=tmp_path, WIDE_TOKEN="guessed")
        assert (code, "wrong token" in err) == (77, True)
        with started("join", address, "--job", job, cwd=tmp_path, **token) as node:
            assert until(lambda: wide("plan", address, cwd=tmp_path, **token)[0] == 0)
            node.kill()
        process.terminate()


def test_wrong_input_to_plan_ends_in_one_line(tmp_path):
    for arguments, words in (
        (("nothing.py",), "nothing.py: no such file"),
        ((DIGITS, "--nodes", 0), "nothing to plan without nodes"),
        (("127.0.0.1:9",), "no token"),
    ):
        code, _, err = wide("plan", *arguments, cwd=tmp_path)
        assert code == 2
        assert words in err
        assert err.count("\n") == 1
