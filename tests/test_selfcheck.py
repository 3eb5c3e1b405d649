"""No honest job is refused by the check that comes before training, and another process finds the same."""

from __future__ import annotations

import itertools

import pytest
import torch

import wide
from tests.jobs import EVERYTHING, make, mlp
from tests.stateful import REFUSED
from wide.job.samples import Samples as Opened
from wide.node.carried import Carried
from wide.node.selfcheck import SelfCheck
from wide.node.trainer import Trainer

CPU = torch.device("cpu")


def checked(job, is_reversed=False):
    trainer = Trainer(job, job.seed, CPU)
    before = trainer.weights.fingerprint()
    samples = Opened(job, job.seed)
    count, carried = -(-len(samples) // job.batch_size), Carried(trainer.namespaces, **trainer.roots, **samples.roots)
    check = SelfCheck(
        trainer, lambda i, other: samples.first_batch(i, job.batch_size, job.seed, other), count, carried, is_reversed
    )
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


def odd_logs():
    """A loss that tells how often it was asked, and trains by nothing of that."""
    count = itertools.count(1)
    return lambda m, b: (m(b[0]).square().mean(), {"calls": float(next(count)), "n": 1.0})


def test_a_metric_that_training_goes_by_must_follow_from_the_batch():
    problem, _ = checked(make(model=mlp, loss=odd_logs(), best="calls"))
    assert "what the loss logs of a batch, and training goes by" in problem
    problem, _ = checked(make(model=mlp, loss=odd_logs(), best="n"))
    assert not problem, "what is only shown may be anything"


def test_a_run_without_nodes_refuses_too_unless_it_is_told_not_to_check(tmp_path):
    job, words = REFUSED["a counter"]
    with pytest.raises(wide.TrainingFailed, match=words):
        wide.run(job, nodes=0, steps=2, out=tmp_path / "a", log="silent")
    assert wide.run(job, nodes=0, steps=2, out=tmp_path / "b", log="silent", check=False).steps == 2
