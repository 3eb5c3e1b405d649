"""Programs that keep state from batch to batch are refused before they train, and no other is."""

from __future__ import annotations

import copy
import itertools
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import wide
from tests.jobs import EVERYTHING, Samples, make, mlp, points
from wide.job.samples import Samples as Opened
from wide.node.selfcheck import SelfCheck
from wide.node.trainer import Trainer

CPU = torch.device("cpu")


def checked(job, is_reversed=False):
    trainer = Trainer(job, job.seed, CPU)
    before = trainer.weights.fingerprint()
    check = SelfCheck(trainer, Opened(job, job.seed), job.batch_size, is_reversed)
    problem = check.problem()
    if not problem:
        assert trainer.weights.fingerprint() == before, "as if nothing had been computed"
    return problem, check.digest


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_honest_job_passes_and_finds_the_same_in_another_process(name):
    job = EVERYTHING[name]
    problem, digest = checked(job)
    assert problem == ""
    assert digest == checked(job, is_reversed=True)[1] != ""


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.calls = mlp(), 0

    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 0.01 * self.calls)


class OwnGenerator(Counting):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.inner(x + 0.1 * torch.randn(x.shape, generator=self.generator))


class Normalizing(Counting):
    def forward(self, x):
        self.inner[0].weight.data = F.normalize(self.inner[0].weight.data)
        return self.inner(x)


class Shrinking(Counting):
    def forward(self, x):
        with torch.no_grad():
            self.inner[0].weight.mul_(0.99)
        return self.inner(x)


class ShrinkingData(Counting):
    def forward(self, x):
        self.inner[0].weight.data.mul_(0.99)
        return self.inner(x)


class Averaging(Counting):
    """An average of activations in a plain attribute."""

    average = 0.0

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * float(x.mean())
        return self.inner(x) + self.average


class Cached(Counting):
    """The first batch's statistics are kept for ever."""

    mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
        return self.inner(x - self.mean)


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def byol(model, batch):
    with torch.no_grad():
        for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            old.mul_(0.9).add_(new, alpha=0.1)
        target = model.teacher(batch[0])
    return F.mse_loss(model.student(batch[0]), target)


def evaluating(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model.eval()
    return loss


class OwnRandomData(torch.utils.data.Dataset):
    def __init__(self):
        self.rng, self.data = np.random.default_rng(0), points()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + float(self.rng.random()), y


def noisy_collate(rng):
    return lambda samples: [
        torch.stack([x for x, _ in samples]) + float(rng.normal()),
        torch.stack([y for _, y in samples]),
    ]


def curriculum():
    calls = itertools.count()
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * (1 + next(calls))


def replay():
    seen = []

    def loss(model, batch):
        seen.append(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1]) + model(seen[0]).square().mean()

    return loss


STATEFUL = {
    "a counter of calls": (make(model=Counting), "keeps state from batch to batch"),
    "a generator of the model's own": (make(model=OwnGenerator), "keeps state from batch to batch"),
    "an average in an attribute": (make(model=Averaging), "keeps state from batch to batch"),
    "a weight assigned in forward": (make(model=Normalizing), "parameter inner.0.weight was replaced"),
    "a weight changed in forward": (make(model=Shrinking), "parameter inner.0.weight was changed"),
    "a weight changed through .data": (make(model=ShrinkingData), "parameter inner.0.weight was changed"),
    "a teacher updated in the loss": (make(model=Taught, loss=byol), "frozen parameter teacher.0.weight was changed"),
    "a loss that leaves eval mode": (make(loss=evaluating), "switches the model between train"),
    "a data set's own generator": (make(dataset=OwnRandomData), "the data of a batch is another one"),
    "a collate's own generator": (
        make(dataset=lambda: Samples(lambda x, y: (x, y)), collate=noisy_collate(np.random.default_rng(3))),
        "the data of a batch is another one",
    ),
    "a loss that counts": (make(loss=curriculum()), "keeps state from batch to batch"),
    "the clock": (
        make(loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * time.perf_counter()),
        "keeps state from batch to batch",
    ),
    "an unseeded generator": (
        make(loss=lambda m, b: F.cross_entropy(m(b[0]), b[1]) * float(np.random.default_rng().random())),
        "keeps state from batch to batch",
    ),
}


@pytest.mark.parametrize("job", [lambda: make(model=Cached), lambda: make(loss=replay())], ids=["cache", "replay"])
def test_what_is_kept_of_the_first_batch_shows_in_a_process_that_began_with_another(job):
    (problem, one), (same, other) = checked(job()), checked(job(), is_reversed=True)
    assert problem == same == ""
    assert one != other


@pytest.mark.parametrize("name", STATEFUL)
def test_state_that_is_kept_from_batch_to_batch_is_refused_in_words(name):
    job, words = STATEFUL[name]
    problem, _ = checked(job)
    assert words in problem
    assert problem != "", "nothing was noticed"


def test_a_run_without_nodes_refuses_too_unless_it_is_told_not_to_check(tmp_path):
    job = make(model=Counting)
    with pytest.raises(wide.TrainingFailed, match="keeps state from batch to batch"):
        wide.run(job, nodes=0, steps=2, out=tmp_path / "a", log="silent")
    assert wide.run(job, nodes=0, steps=2, out=tmp_path / "b", log="silent", check=False).steps == 2
