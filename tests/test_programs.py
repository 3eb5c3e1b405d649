"""What real programs do, in one process: what their losses say, and what is told when they go wrong."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import wide
from tests.jobs import RIVALS, Rivals, make, mlp, per_sample, points
from wide.errors import TrainingFailed, UsageError

BALANCE = 0.9


def trained(tmp_path, steps=6, **changes):
    return wide.run(make(**changes), nodes=0, steps=steps, log="silent", out=tmp_path / "run")


def rows(result, query):
    with closing(sqlite3.connect(f"{result.run_dir}/run.db")) as db:
        return db.execute(query).fetchall()


def ce(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


# ── what a loss says ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_gradient_of_totals_is_that_of_one_big_batch(tmp_path):
    job = make(
        model=lambda: nn.Linear(6, 3),
        loss=per_sample,
        batch_size=40,
        batches_per_step=None,
        order=wide.order.sequential(),
    )
    result = wide.run(job, nodes=0, steps=2, log="silent", out=tmp_path / "run")
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer, (x, y) = job.optimizer(list(model.parameters())), points().tensors
    losses = []
    for first in (0, 40):
        optimizer.zero_grad()
        said = per_sample(model, (x[first : first + 40], y[first : first + 40]))
        loss = said.sum / said.count
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert [loss for (loss,) in rows(result, "SELECT loss FROM steps")] == pytest.approx(losses, rel=1e-6)
    for mine, theirs in zip(result.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-6)


def test_a_batch_without_anything_to_count_counts_for_nothing(tmp_path):
    def loss(model, batch):
        is_counted = float(wide.here().batch != 1)
        return wide.total(ce(model, batch) * is_counted, is_counted)

    result = trained(tmp_path, loss=loss)
    assert result.steps == 6
    assert math.isfinite(result.loss_last)


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (lambda: 0, "add up to 0 in all batches of a step"),
        (lambda: math.nan, "count is a number of at least 0, got nan"),
        (lambda: -1, "got -1"),
        (lambda: 1e-300, "count is 0, or at least 1e-12, got 1e-300"),
        (lambda: "many", "got str"),
        (lambda: torch.ones(2), r"count has shape \(2,\), not one number"),
        (lambda: torch.ones((), requires_grad=True), "count has a gradient"),
    ],
)
def test_counts_that_mean_nothing_are_explained(tmp_path, count, words):
    with pytest.raises(TrainingFailed, match=words):
        trained(tmp_path, loss=lambda model, batch: wide.total(ce(model, batch), count()))


def test_some_batches_with_totals_and_some_with_means_are_refused(tmp_path):
    def loss(model, batch):
        return wide.total(ce(model, batch), 1) if wide.here().batch else ce(model, batch)

    with pytest.raises(TrainingFailed, match="for some batches of a step, and a mean for others"):
        trained(tmp_path, loss=loss)


def test_metrics_are_means_over_a_steps_samples(tmp_path):
    def loss(model, batch):
        wide.log(first=batch[1].float().mean(), batch=wide.here().batch)
        return ce(model, batch), {"acc": (model(batch[0]).argmax(1) == batch[1]).float().mean()}

    result = trained(tmp_path, steps=3, loss=loss)
    assert set(result.metrics) == {"first", "acc", "batch"}
    logged = rows(result, "SELECT step, metric, value, samples FROM logged ORDER BY step, metric")
    assert len(logged) == 9
    assert [(step, value) for step, name, value, _ in logged if name == "batch"] == [(0, 1.5), (1, 1.5), (2, 14 / 19)]
    assert [samples for *_, samples in logged[::3]] == [32.0, 32.0, 19.0]


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"acc": "high"}, r"wide.log\(acc=…\) takes a number"),
        ({"acc": torch.ones(2)}, r"wide.log\(acc=…\) takes a number"),
        ({"a" * 65: 1.0}, "a metric's name has 1 to 64 characters"),
        ({f"m{i}": 1.0 for i in range(65)}, "65 metrics in one batch, at most 64"),
    ],
)
def test_metrics_that_are_none_are_explained(tmp_path, said, words):
    with pytest.raises(TrainingFailed, match=words):
        trained(tmp_path, loss=lambda model, batch: (ce(model, batch), said))


def test_here_is_where_the_run_is(tmp_path):
    seen = []

    def loss(model, batch):
        seen.append((*wide.here(), wide.here().progress))
        return ce(model, batch)

    job = make(loss=loss, evaluate=lambda model: {"at": wide.here().step})
    result = wide.run(job, nodes=0, steps=4, log="silent", out=tmp_path / "run", check=False)
    assert sorted(seen)[:5] == [(0, 0, 0, 4, 0), (0, 0, 1, 4, 0), (0, 0, 2, 4, 0), (0, 0, 3, 4, 0), (1, 0, 0, 4, 0.25)]
    assert seen[-1][:2] == (3, 1), "the second epoch"
    assert result.metrics == {"at": 4.0}
    with pytest.raises(TrainingFailed, match=r"wide.here\(\) is for the job's loss"):
        wide.here()


def test_progress_of_a_run_that_ends_by_time_is_not_known(tmp_path):
    job = make(loss=lambda model, batch: ce(model, batch) * wide.here().progress)
    with pytest.raises(TrainingFailed, match="this run ends by time"):
        wide.run(job, nodes=0, seconds=5, log="silent", out=tmp_path / "run")


# ── optimizers ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Averaging(torch.optim.Optimizer):
    """Trains with one set of weights, and is evaluated with another: schedule-free, in a few lines."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "steps": 0, "is_training": True})

    def train(self):
        self._move(True, BALANCE - 1)

    def eval(self):
        self._move(False, 1 - 1 / BALANCE)

    @torch.no_grad()
    def _move(self, is_training, amount):
        for group in self.param_groups:
            if group["is_training"] != is_training:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        p.lerp_(self.state[p]["z"], abs(amount) if is_training else amount)
            group["is_training"] = is_training

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            assert group["is_training"]
            group["steps"] += 1
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                x = (p - (1 - BALANCE) * z) / BALANCE
                z.sub_(p.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["steps"])
                p.copy_(BALANCE * x + (1 - BALANCE) * z)


def test_an_optimizer_with_two_sets_of_weights_is_evaluated_and_kept_with_the_right_one(tmp_path):
    seen = []
    job = make(
        optimizer=Averaging, evaluate=lambda model: seen.append(model.state_dict()) or {"n": 1}, evaluate_every=2
    )
    often = wide.run(job, nodes=0, steps=6, checkpoint_every=1e-9, log="silent", out=tmp_path / "often")
    seldom = wide.run(make(optimizer=Averaging), nodes=0, steps=6, log="silent", out=tmp_path / "seldom")
    assert often.weights_sha256 == seldom.weights_sha256, "looking at it changes nothing"
    kept = load_file(next((tmp_path / "often" / "checkpoints").glob("step-00000006/model.safetensors")))
    for name, value in often.model.state_dict().items():
        assert torch.equal(kept[name], value)
        assert torch.equal(seen[-1][name], value)
    half = wide.run(job, nodes=0, steps=3, log="silent", out=tmp_path / "half")
    assert wide.run(job, nodes=0, steps=6, resume=half.run_dir, log="silent").weights_sha256 == often.weights_sha256


class Assigning(Averaging):
    """The same, but it puts new tensors in the place of old ones."""

    def _move(self, is_training, amount):
        super()._move(is_training, amount)
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data.clone()

    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                p.data = p.data + 0


def test_an_optimizer_that_assigns_data_trains_as_one_that_does_not(tmp_path):
    changes = {"evaluate": lambda model: {"n": 1}, "evaluate_every": 2}
    one = trained(tmp_path / "1", optimizer=Averaging, **changes)
    assert trained(tmp_path / "2", optimizer=Assigning, **changes).weights_sha256 == one.weights_sha256


def test_two_phases_that_train_the_same_are_refused(tmp_path):
    same = (RIVALS[0], wide.Phase(RIVALS[1].loss, lambda params: torch.optim.SGD(params, lr=0.1)))
    with pytest.raises(TrainingFailed, match="phases 0 and 1 train the same parameter"):
        trained(tmp_path, model=Rivals, phases=same, loss=None, optimizer=None)


def test_a_phase_trains_its_own_parameters_only(tmp_path):
    result = trained(tmp_path, steps=1, model=Rivals, phases=RIVALS, loss=None, optimizer=None)
    torch.manual_seed(3)
    before = Rivals()
    assert torch.equal(result.model.maker.weight, before.maker.weight)
    assert not torch.equal(result.model.critic.weight, before.critic.weight)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"phases": RIVALS}, "leave out loss and optimizer"),
        ({"phases": [ce], "loss": None, "optimizer": None}, "is a list of wide.Phase"),
        ({"best": ""}, "must be the name of a metric"),
        ({"evaluate_every": 0}, "must be a whole number of at least 1"),
        ({"after_step": 3}, "must be a function or None"),
        ({"order": "shuffled"}, "must be a function or None"),
    ],
)
def test_fields_that_cannot_be_are_explained(fields, words):
    with pytest.raises(UsageError, match=words):
        make(**fields)


def test_a_scheduler_whose_numbers_look_like_epochs_is_asked_about_once(tmp_path, caplog):
    job = make(epochs=4, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=2))
    result = wide.run(job, nodes=0, out=tmp_path / "run")
    words = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    assert words.count("StepLR(step_size=2) is stepped once an update, and an epoch has 3 of them") == 1
    assert result.steps == 12


# ── after_step ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_average_that_follows_after_each_step_is_part_of_the_model(tmp_path):
    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.average = mlp(), mlp().requires_grad_(False)

        def forward(self, x):
            return self.net(x)

    def follow(model, where):
        for mine, theirs in zip(model.average.parameters(), model.net.parameters(), strict=True):
            mine.lerp_(theirs, 1.0 if where.step == 0 else 0.5)

    one, six = (trained(tmp_path / str(n), n, model=Averaged, after_step=follow).model for n in (1, 6))
    assert torch.equal(one.average[0].weight, one.net[0].weight)
    assert not torch.equal(six.average[0].weight, six.net[0].weight)


@pytest.mark.parametrize(
    ("after_step", "words"),
    [
        (lambda model, where: 1 / 0, "after_step failed: ZeroDivisionError"),
        (lambda model, where: model[0].weight.fill_(math.nan), "not finite, in step 0"),
        (
            lambda model, where: setattr(model[0], "weight", nn.Parameter(torch.zeros(1))),
            "another parameter in the place",
        ),
    ],
)
def test_an_after_step_that_goes_wrong_is_told(tmp_path, after_step, words):
    with pytest.raises(TrainingFailed, match=words):
        trained(tmp_path, after_step=after_step)


def test_a_parameter_that_is_given_other_memory_keeps_its_value(tmp_path):
    def halve(model, where):
        model[0].weight.data = model[0].weight.data * 0.5

    def halve_in_place(model, where):
        model[0].weight.mul_(0.5)

    one, two = trained(tmp_path / "1", after_step=halve), trained(tmp_path / "2", after_step=halve_in_place)
    assert one.weights_sha256 == two.weights_sha256


SHARED = {"scale": 1.0}
KEPT = {"steps": 0}


def scaled(model, batch):
    return ce(model, batch) * SHARED["scale"]


def changes_what_the_loss_sees(model, where):
    SHARED["scale"] = 1.0 + where.step


def keeps_something(model, where):
    KEPT["steps"] += 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"after_step": changes_what_the_loss_sees, "loss": scaled},
            r"after_step changes SHARED .* which the losses on the nodes do not see",
        ),
        ({"after_step": lambda model, where: setattr(model, "heat", where.step)}, r"after_step changes model.heat"),
        (
            {"after_step": lambda model, where: model.eval() and None},
            r"switches the model between train\(\) and eval\(\)",
        ),
    ],
)
def test_an_after_step_that_changes_what_only_it_can_see_is_refused(tmp_path, changes, words):
    class Warm(nn.Module):
        heat = 0

        def __init__(self):
            super().__init__()
            self.net, self.heat = mlp(), -1

        def forward(self, x):
            return self.net(x)

    with pytest.raises(TrainingFailed, match=words):
        trained(tmp_path, model=Warm, **changes)


def test_what_an_after_step_keeps_for_itself_is_told_once(tmp_path):
    trained(tmp_path, after_step=keeps_something)
    words = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    assert words.count("after_step keeps KEPT") == 1


# ── updates in pieces ────────────────────────────────────────────────────────────────────────────────────────────────


def contrastive(model, batch):
    seen = nn.functional.normalize(model(batch[0]), dim=1)
    return nn.functional.cross_entropy(seen @ seen.T, torch.arange(len(seen)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, ""),
        ({"loss": per_sample}, ""),
        ({"loss": lambda model, batch: ce(model, batch) + torch.rand(()) * model[0].weight.sum()}, ""),
        ({"loss": contrastive}, "so a loss that compares samples, or is a sum, is another one"),
        ({"loss": lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="sum")}, "or is a sum"),
        ({"model": lambda: nn.Sequential(nn.BatchNorm1d(6), mlp())}, "BatchNorm sees one at a time"),
        ({"loss": contrastive, "batches_per_step": 1}, ""),
    ],
)
def test_a_loss_that_is_another_one_in_pieces_is_told(tmp_path, changes, words):
    trained(tmp_path, steps=1, **({"batch_size": 32, "batches_per_step": None} | changes))
    log = (tmp_path / "run" / "log.jsonl").read_text(encoding="utf-8")
    assert ("batches_per_step=1 keeps updates whole" in log) == bool(words)
    assert words in log


# ── where it begins and ends ─────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_begins_with_the_weights_that_it_is_given(tmp_path):
    weights = {name: value + 1 for name, value in mlp().state_dict().items()}
    save_file(weights, tmp_path / "w.safetensors")
    torch.save({"state_dict": weights}, tmp_path / "w.pt")
    hashes = {
        trained(tmp_path / str(i), init=init).weights_sha256
        for i, init in enumerate((weights, tmp_path / "w.safetensors", str(tmp_path / "w.pt")))
    }
    assert len(hashes) == 1
    assert trained(tmp_path / "none").weights_sha256 not in hashes


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ({"odd": torch.zeros(1)}, "a state dict is not this model's"),
        ("nowhere.safetensors", "nowhere.safetensors cannot be read"),
        (7, "is a state dict, or a .safetensors or .pt file"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, init, words):
    with pytest.raises(UsageError, match=words):
        trained(tmp_path, init=init)


def test_a_run_ends_when_the_job_says_so_and_keeps_the_best(tmp_path):
    values = iter((0.1, 0.9, 0.3, 0.2, 0.1))
    job = make(
        evaluate=lambda model: {"acc": next(values)},
        evaluate_every=2,
        best="acc",
        stop_when=lambda said: said[-1]["acc"] == 0.2,
    )
    result = wide.run(job, nodes=0, steps=40, keep=1, log="silent", out=tmp_path / "run")
    assert result.steps == 8
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "best").read_text(encoding="utf-8").strip() == "step-00000004"
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-00000004", "step-00000008"]


def test_a_run_that_the_job_ended_is_over_when_it_is_resumed(tmp_path):
    job = make(stop_when=lambda said: said[-1]["loss"] < 2.0, evaluate_every=3)
    result = wide.run(job, nodes=0, steps=40, log="silent", out=tmp_path / "run")
    again = wide.run(job, nodes=0, steps=40, log="silent", resume=tmp_path / "run")
    assert result.steps == again.steps == 3
