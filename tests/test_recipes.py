"""docs/jobs.md: every recipe runs as it stands there, and a pool makes of it what a plain loop makes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import wide
from benchmarks.recipes import job_of, recipes
from wide.job.model import build_model
from wide.store.checkpoint import best

pytestmark = pytest.mark.processes

RECIPES = recipes()
POOLS = ({"nodes": 3}, {"nodes": 2, "data": "stream"}, {"nodes": 1})
ALSO = {}  # by the recipe's name: what is true of it


def also(name):
    def keep(states):
        ALSO[name] = states
        return states

    return keep


def test_there_are_thirty_and_no_two_have_one_name():
    names = [recipe.name for recipe in RECIPES]
    assert len(names) >= 30
    assert len(set(names)) == len(names)
    assert set(ALSO) <= set(names)


@pytest.mark.parametrize(("recipe", "number"), [(r, i) for i, r in enumerate(RECIPES)], ids=[r.name for r in RECIPES])
def test_a_recipe_gives_the_same_bits_in_a_pool(recipe, number, tmp_path):
    job = job_of(recipe, tmp_path)
    alone = wide.run(job, nodes=0, out=tmp_path / "alone", log="silent")
    pool = wide.run(job, out=tmp_path / "pool", log="silent", **POOLS[number % len(POOLS)])
    assert pool.weights_sha256 == alone.weights_sha256
    assert pool.steps == alone.steps
    assert pool.metrics == alone.metrics
    assert math.isfinite(pool.loss_first)
    assert math.isfinite(pool.loss_last)
    if recipe.name in ALSO:
        ALSO[recipe.name](job, pool)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def first_weights(job):
    """The model as it was in the beginning."""
    return build_model(job, job.seed)


@also("Your own metrics")
def _(job, result):
    assert set(result.metrics) == {"margin", "accuracy"}


@also("Several tasks, batches that are dicts")
def _(job, result):
    assert set(result.metrics) == {"kind", "size"}


@also("A policy gradient (REINFORCE)")
def _(job, result):
    assert result.metrics["reward"] > 0.4
    assert result.steps < job.steps


@also("Bucketing by length")
def _(job, result):
    assert result.metrics["padding"] < 0.2


@also("Learning-rate warm-up")
def _(job, result):
    assert result.loss_last < result.loss_first


@also("StepLR, once an epoch")
def _(job, result):
    assert result.epochs == 3


@also("Schedule-free optimizer")
def _(job, result):
    assert result.metrics["norm"] == pytest.approx(result.model[0].weight.norm().item(), rel=1e-6)


@also("GAN")
def _(job, result):
    before = first_weights(job)
    assert not same(before.maker, result.model.maker)
    assert not same(before.judge, result.model.judge)


@also("Exponential moving average")
def _(job, result):
    assert not same(result.model.net, result.model.average)


@also("Momentum teacher (BYOL, MoCo, DINO)")
def _(job, result):
    assert not same(result.model.pupil, result.model.teacher)
    assert not same(first_weights(job).teacher, result.model.teacher)


@also("Clipping or normalising weights")
def _(job, result):
    assert result.model[0].weight.abs().max() <= 0.2
    assert torch.allclose(result.model[2].weight.norm(dim=1), torch.ones(3))


@also("LoRA by hand")
def _(job, result):
    assert result.model[0].b.abs().max() > 0
    assert not result.model[0].base.weight.requires_grad


@also("Freezing first, unfreezing later")
def _(job, result):
    assert not same(first_weights(job)[0], result.model[0])


@also("Warm start from a file")
def _(job, result):
    begun = torch.load(job.init)["0.weight"]
    assert (result.model[0].weight - begun).norm() < begun.norm() / 2


@also("Knowledge distillation")
def _(job, result):
    assert result.loss_last < result.loss_first


@also("State that is carried from batch to batch")
def _(job, result):
    assert result.model.mean.abs().max() > 0


@also("Early stopping")
def _(job, result):
    assert result.steps < job.steps
    assert "accuracy" in result.metrics


@also("Keeping the best")
def _(job, result):
    kept = best(Path(result.run_dir) / "checkpoints")
    assert kept is not None
