"""A run that was stopped, killed or damaged goes on: to the same bits in sync, with each batch merged once in all."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sqlite3
from pathlib import Path

import pytest
import torch

import wide as package
from tests import plain
from tests.jobs import EVERYTHING, make, points
from tests.processes import result_of, started, until, wide
from tests.test_run import SLOW_LOSS, a_job
from tests.test_serve import query
from wide.job.schedule import Schedule
from wide.store.weights import weights_sha256

pytestmark = pytest.mark.processes


def quietly(job, folder, **options):
    return package.run(job, nodes=0, log="silent", out=folder, **options)


@pytest.mark.parametrize("name", EVERYTHING)
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(name, tmp_path):
    job = EVERYTHING[name]
    quietly(job, tmp_path, steps=4)
    resumed = quietly(job, tmp_path, steps=7, resume="auto")
    assert resumed.weights_sha256 == weights_sha256(plain.train(job, 7))
    assert (resumed.steps, resumed.batches) == (7, sum(part.batches for part in resumed.nodes))


SCHEDULERS = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=20),
    "milestones": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 3, 5]),
    "a function": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "one after the other": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[3],
    ),
    "without a memory of its own": lambda o: Halving(o),
}


class Halving:
    """Has no state_dict: all it can do is step."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "two groups": lambda p: torch.optim.SGD([{"params": p[:1], "lr": 0.2}, {"params": p[1:]}], lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on_where_it_was(name, tmp_path):
    job = make(scheduler=SCHEDULERS[name])
    quietly(job, tmp_path, steps=4)
    resumed = quietly(job, tmp_path, steps=7, resume="auto")
    assert resumed.weights_sha256 == weights_sha256(plain.train(job, 7))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_where_it_was(name, tmp_path):
    job = make(optimizer=OPTIMIZERS[name])
    quietly(job, tmp_path, steps=4)
    assert quietly(job, tmp_path, steps=7, resume="auto").weights_sha256 == weights_sha256(plain.train(job, 7))


def test_state_of_another_precision_than_its_weights_is_kept_to_the_bit(tmp_path):
    class Careful(torch.optim.Optimizer):
        """Weights in bf16, sums in fp32."""

        def __init__(self, params):
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                if p.grad is not None:
                    exact = self.state[p].setdefault("exact", p.float())
                    exact -= 0.05 * p.grad.float()
                    p.copy_(exact)

    job = make(
        model=lambda: torch.nn.Linear(6, 3).bfloat16(),
        loss=lambda model, batch: torch.nn.functional.cross_entropy(model(batch[0].bfloat16()), batch[1]),
        optimizer=Careful,
    )
    quietly(job, tmp_path, steps=4)
    assert quietly(job, tmp_path, steps=7, resume="auto").weights_sha256 == weights_sha256(plain.train(job, 7))


def test_auto_begins_a_run_if_there_is_none_and_finds_the_newest_of_this_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = a_job(tmp_path, "steps=3")
    first = result_of("run", job, "--nodes", 0, "--resume", "auto", cwd=tmp_path)
    again = result_of("run", job, "--nodes", 0, "--resume", "auto", "--steps", 5, cwd=tmp_path)
    assert (first["steps"], again["steps"], again["run_dir"]) == (3, 5, first["run_dir"])
    finished = result_of("run", job, "--nodes", 0, "--resume", "auto", "--steps", 5, cwd=tmp_path)
    assert finished["weights_sha256"] == again["weights_sha256"]
    assert (finished["seconds"], finished["batches"]) == (again["seconds"], again["batches"])


def test_a_damaged_checkpoint_is_told_of_and_an_older_one_goes_on_to_the_same_bits(tmp_path, capsys):
    job = make()
    quietly(job, tmp_path, steps=4)
    quietly(job, tmp_path, steps=6, resume="auto")
    (tmp_path / "checkpoints" / "step-00000006" / "model.safetensors").write_bytes(b"rubbish")
    capsys.readouterr()
    resumed = quietly(job, tmp_path, steps=7, resume="auto")
    assert "step-00000006 cannot be used" in capsys.readouterr().err
    assert resumed.weights_sha256 == weights_sha256(plain.train(job, 7))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--resume", "nowhere"), "--resume nowhere: there is no run in it"),
        (("--resume", "here", "--out", "there"), "leave --out away"),
        (("--resume", "here", "--seed", 9), "was begun with seed 3"),
        (("--out", "here"), "already holds a run: go on with it (--resume here)"),
        (("--checkpoint-every", "never"), "--checkpoint-every never: expected a number"),
        (("--checkpoint-every", 0), "must be a number above 0"),
        (("--keep", 0), "--keep 0: must be at least 1"),
    ],
)
def test_what_cannot_be_resumed_ends_with_2_and_one_line(tmp_path, options, words):
    job = a_job(tmp_path, "steps=2")
    quietly(make(), tmp_path / "here", steps=2)
    code, out, err = wide("run", job, "--nodes", 0, "--log", "silent", *options, cwd=tmp_path)
    assert (code, out) == (2, "")
    (line,) = err.strip().splitlines()
    assert words in line


def test_another_model_is_not_put_into_this_run(tmp_path):
    quietly(make(), tmp_path, steps=2)
    with pytest.raises(package.errors.TrainingFailed, match="this job's model is not the one that was saved"):
        quietly(make(model=lambda: torch.nn.Linear(6, 3)), tmp_path, steps=4, resume="auto")


def ledger(folder):
    """Every batch in the ledger of a sync run: (step, batch)."""
    rows = sqlite3.connect(folder / "run.db").execute("SELECT step, first_batch, last_batch FROM ledger").fetchall()
    return sorted((step, batch) for step, first, last in rows for batch in range(first, last + 1))


def test_going_on_alone_after_a_pool_of_another_strategy_keeps_the_whole_ledger(tmp_path):
    job = a_job(tmp_path, "dataset=lambda: points(32)")  # one step an epoch, so that batches count alike in all
    first = result_of("run", job, "--nodes", 2, "--strategy", "async", "--steps", 20, "--out", "here", cwd=tmp_path)
    assert first["steps"] == 20
    for steps in (30, 31, 79):
        quietly(make(dataset=lambda: points(32)), tmp_path / "here", steps=steps, resume="auto", strategy="sync")
        assert ledger(tmp_path / "here") == [(step, batch) for step in range(steps) for batch in range(4)]
        assert (tmp_path / "here" / "checkpoints" / "latest").read_text().strip() == f"step-{steps:08d}"


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_run_that_is_longer_than_it_should_be_is_done(tmp_path, strategy):
    job = a_job(tmp_path, "steps=10")
    first = result_of("run", job, "--nodes", 2, "--strategy", strategy, "--steps", 20, "--out", "here", cwd=tmp_path)
    again = result_of("run", job, "--nodes", 2, "--resume", "here", "--steps", 10, cwd=tmp_path)
    assert (again["steps"], again["weights_sha256"]) == (20, first["weights_sha256"])


def test_how_long_to_train_is_remembered_and_any_new_wish_replaces_it(tmp_path):
    job = make(steps=3, epochs=None)
    quietly(job, tmp_path, steps=6)
    assert quietly(job, tmp_path, resume="auto").steps == 6
    assert quietly(job, tmp_path, resume="auto", epochs=3).steps == 9


def test_a_job_that_fails_alone_keeps_what_it_trained(tmp_path):
    def loss(model, batch):
        calls.append(1)
        if len(calls) == 22:
            raise ValueError("a bad day")
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    calls = []
    job = make(loss=loss)
    with pytest.raises(package.errors.TrainingFailed, match="a bad day.*what was trained until step 5 is in"):
        quietly(job, tmp_path, steps=12, check=False)
    assert quietly(job, tmp_path, steps=12, resume="auto").weights_sha256 == weights_sha256(plain.train(make(), 12))


def test_an_evaluation_that_was_not_finished_is_made_up_for(tmp_path):
    job = make(evaluate=lambda model: {"one": 1.0})
    quietly(make(), tmp_path, steps=3)  # an epoch, killed before it was evaluated
    assert quietly(job, tmp_path, steps=3, resume="auto").metrics == {"one": 1.0}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch_size": 4}, "was begun with batch_size 8, and this job has 4"),
        ({"batches_per_step": 2}, "was begun with batches_per_step 4, and this job has 2"),
        ({"dataset": lambda: points(50)}, "was begun with samples 83, and this job has 50"),
    ],
)
def test_a_job_whose_batches_are_others_is_not_resumed(tmp_path, changes, words):
    quietly(make(), tmp_path, steps=2)
    with pytest.raises(package.errors.UsageError, match=words):
        quietly(make(**changes), tmp_path, steps=4, resume="auto")


def test_settings_that_were_changed_in_the_job_are_told_of(tmp_path, capsys):
    quietly(make(), tmp_path, steps=2)
    package.run(
        make(optimizer=lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, weight_decay=0.01)),
        nodes=0,
        out=tmp_path,
        steps=3,
        resume="auto",
    )
    assert "the optimizer goes on as it was (lr 0.01 in the job, 0.1 in the run)" in capsys.readouterr().err


def test_auto_takes_no_other_jobs_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("20261116-014036-02", "20261116-014036-my-01", "20261116-014036-01x"):
        quietly(make(), Path("runs") / name, steps=2)
    job = a_job(tmp_path, "steps=1", name="01.py")
    assert result_of("run", job, "--nodes", 0, "--resume", "auto", cwd=tmp_path)["steps"] == 1


def test_checkpoints_without_their_ledger_are_not_begun_upon(tmp_path):
    quietly(make(), tmp_path, steps=2)
    (tmp_path / "run.db").unlink()
    with pytest.raises(package.errors.UsageError, match="holds the checkpoints of a run, but no run.db"):
        quietly(make(), tmp_path, steps=4, resume="auto")


def test_numbers_that_cannot_be_written_are_told_of_and_the_thread_lives(tmp_path, monkeypatch):
    monkeypatch.setattr("wide.coordinator.checkpoints.CLOSING_S", 0.5)
    job = make(
        model=lambda: torch.nn.Linear(6, 3).to(torch.complex128),
        loss=lambda model, batch: model(batch[0].to(torch.complex128)).abs().square().mean(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.01),
    )
    with pytest.raises(package.errors.TrainingFailed, match="the last checkpoint could not be written .KeyError"):
        quietly(job, tmp_path, steps=2)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return listening.getsockname()[1]


@contextlib.contextmanager
def coordinator(tmp_path, job, port, *options):
    """`wide serve` on a port of its own, in ./here, going on with what is there; its words are in serve.log."""
    with open(tmp_path / "serve.log", "a") as log:
        arguments = ("--port", port, "--out", "here", "--resume", "auto", "--json", "--checkpoint-every", 0.3)
        with started("serve", job, *arguments, *options, cwd=tmp_path, stderr=log, WIDE_TOKEN="t" * 32) as process:
            yield process


@contextlib.contextmanager
def listening(tmp_path, job, port, *options):
    """The same, and nodes may join it now."""
    with coordinator(tmp_path, job, port, *options) as process:
        assert until(lambda: "wide join" in said(tmp_path))
        yield process


def said(tmp_path):
    return (tmp_path / "serve.log").read_text()


def ledger_is_exact(tmp_path, strategy, steps, schedule):
    db = sqlite3.connect(tmp_path / "here" / "run.db")
    merged = [
        (schedule.step(step).epoch, batch + (schedule.step(step).first if strategy == "sync" else 0))
        for step, first, last in db.execute("SELECT step, first_batch, last_batch FROM ledger")
        for batch in range(first, last + 1)
    ]
    expected = [divmod(at, schedule.batches_per_epoch) for at in range(schedule.position(steps))]
    return sorted(merged) == expected


@pytest.mark.parametrize(
    ("strategy", "number"), [("sync", signal.SIGKILL), ("async", signal.SIGKILL), ("local", signal.SIGTERM)]
)
def test_a_killed_or_stopped_coordinator_goes_on_and_its_nodes_come_back_by_themselves(tmp_path, strategy, number):
    job, port = a_job(tmp_path, "steps=150, loss=loss, dataset=lambda: points(200)", SLOW_LOSS), free_port()
    token = {"WIDE_TOKEN": "t" * 32}
    with contextlib.ExitStack() as nodes:
        with listening(tmp_path, job, port, "--strategy", strategy) as first:
            joined = [
                nodes.enter_context(started("join", f"127.0.0.1:{port}", "--job", job, cwd=tmp_path, **token))
                for _ in range(2)
            ]
            assert until(lambda: query(tmp_path, "SELECT count(DISTINCT node) FROM ledger") == [(2,)]), (
                "both have joined"
            )
            assert until(lambda: (tmp_path / "here" / "checkpoints" / "latest").exists())
            before = query(tmp_path, "SELECT count(*) FROM steps")[0][0]
            assert until(lambda: query(tmp_path, "SELECT count(*) FROM steps")[0][0] > before)
            first.send_signal(number)
            assert first.wait(20) in (-signal.SIGKILL, 128 + signal.SIGTERM)
        with coordinator(tmp_path, job, port) as second:
            out, _ = second.communicate(timeout=90)
            assert second.returncode == 0, said(tmp_path)
            assert [node.wait(20) for node in joined] == [0, 0]
    result = json.loads(out)
    assert (result["strategy"], result["steps"]) == (strategy, 150), "it remembers its strategy"
    assert ledger_is_exact(tmp_path, strategy, 150, Schedule(200, 8, 4, 3))
    if strategy == "sync":
        alone = make(steps=150, dataset=lambda: points(200))
        assert result["weights_sha256"] == weights_sha256(plain.train(alone, 150))


def test_a_second_coordinator_does_not_get_the_folder(tmp_path):
    job = a_job(tmp_path, "steps=100, loss=loss", SLOW_LOSS)
    with coordinator(tmp_path, job, free_port()) as first:
        assert until(lambda: (tmp_path / "here" / "run.db").exists())
        code, _, err = wide("serve", job, "--port", free_port(), "--out", "here", "--resume", "auto", cwd=tmp_path)
        assert (code, "one run folder has one coordinator" in err) == (2, True)
        assert first.poll() is None
        first.terminate()


def test_an_interrupted_run_says_how_to_go_on_and_does_so(tmp_path):
    job = a_job(tmp_path, "steps=60, loss=loss", SLOW_LOSS)
    with started("run", job, "--nodes", 2, "--out", "here", cwd=tmp_path) as process:
        assert until(lambda: query(tmp_path, "SELECT count(*) FROM steps") > [(3,)])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "go on with --resume here" in err
    resumed = result_of("run", job, "--nodes", 3, "--resume", "here", cwd=tmp_path)
    assert resumed["weights_sha256"] == weights_sha256(plain.train(make(), 60))


def test_a_paused_node_does_not_hold_up_the_others_and_works_on_when_it_wakes(tmp_path):
    job, port = a_job(tmp_path, "steps=400, loss=loss", SLOW_LOSS), free_port()
    token = {"WIDE_TOKEN": "t" * 32}
    with (
        listening(tmp_path, job, port) as serving,
        started("join", f"127.0.0.1:{port}", "--job", job, cwd=tmp_path, **token) as steady,
        started("join", f"127.0.0.1:{port}", "--job", job, "--name", "sleepy", cwd=tmp_path, **token) as sleepy,
    ):
        assert until(lambda: len(query(tmp_path, "SELECT DISTINCT node FROM ledger")) > 1)
        os.kill(sleepy.pid, signal.SIGSTOP)
        assert until(lambda: "(sleepy) is silent" in said(tmp_path))
        steps = query(tmp_path, "SELECT count(*) FROM steps")
        assert until(lambda: query(tmp_path, "SELECT count(*) FROM steps") > steps), "the others go on"
        os.kill(sleepy.pid, signal.SIGCONT)
        assert until(lambda: "(sleepy) is back" in said(tmp_path))
        assert serving.wait(90) == 0
        assert (steady.wait(20), sleepy.wait(20)) == (0, 0)
