"""wide.hf where transformers is not installed, and those of its parts that need nothing of it."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import wide
from wide.hf.copies import copied
from wide.hf.evaluation import Patience, every, metric_of
from wide.hf.finish import logged
from wide.hf.loss import Pace
from wide.hf.order import Batches

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


@pytest.mark.skipif(HAS_TRANSFORMERS, reason="it is here")
def test_without_transformers_one_line_says_what_to_install():
    with pytest.raises(wide.UsageError, match=r"^wide.hf needs transformers: pip install 'wiiiiide\[hf\]'$"):
        wide.hf.job(object())


@pytest.mark.parametrize("what", [None, torch.nn.Linear(2, 2), "trainer"])
def test_what_is_no_trainer_is_refused_in_one_line(what, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: SimpleNamespace())
    with pytest.raises(wide.UsageError, match="takes a constructed transformers.Trainer, got a") as refused:
        wide.hf.job(what)
    assert "\n" not in str(refused.value)


def test_importing_wide_and_wide_hf_loads_neither_transformers_nor_torch():
    words = "import sys, wide, wide.hf; print(sorted({'torch', 'transformers', 'accelerate'} & set(sys.modules)))"
    said = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "[]"


class Shuffling:
    """Like accelerate's: another order each epoch, and the next one when it is asked again."""

    def __init__(self, count):
        self.count, self.epoch = count, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.count

    def __iter__(self):
        yield from torch.randperm(self.count, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.epoch += 1


def test_a_sampler_is_told_the_epoch_and_says_the_same_again():
    order = Batches(torch.utils.data.BatchSampler(Shuffling(11), 4, drop_last=False))
    first, second = order(0, None), order(1, None)
    assert first != second
    assert (order(0, None), order(1, None)) == (first, second)
    assert [len(batch) for batch in first] == [4, 4, 3]


def test_an_epochs_last_step_may_be_short():
    pace = Pace(steps=3, batches=10, batches_per_step=4, max_steps=6)
    assert [pace.in_step(step) for step in range(6)] == [4, 4, 2, 4, 4, 2]
    assert [pace.epoch(steps) for steps in range(5)] == [0.0, 0.4, 0.8, 1.0, 1.4]
    assert Pace(0, 0, 4, 6).epoch(3) == 0.0


def test_patience_ends_after_so_many_evaluations_that_are_no_better():
    stop = Patience("eval_loss", False, 2, 0.0)
    values = [3.0, 2.0, 2.0, 1.9, 1.95, 1.9]
    said = [{"eval_loss": value} for value in values]
    assert [stop(said[:count]) for count in range(1, 7)] == [False, False, False, False, False, True]
    assert Patience("eval_loss", False, 1, 0.5)(said[:4])
    assert not Patience("eval_accuracy", True, 1, 0.0)([{"eval_accuracy": 0.1}, {"eval_accuracy": 0.2}])


def test_intervals_may_be_a_part_of_the_training():
    args = SimpleNamespace(eval_strategy="steps", eval_steps=0.1, logging_strategy="epoch", logging_steps=5)
    assert (every(args, "eval", 55), every(args, "logging", 55)) == (6, None)
    args = SimpleNamespace(metric_for_best_model="loss", eval_strategy="steps", greater_is_better=False)
    assert metric_of(args) == ("eval_loss", False)


def test_the_history_has_means_since_the_last_entry():
    rows = [{"step": i, "epoch": 1, "samples": 4, "loss": float(i), "seconds": 0.1, "at": 0.0} for i in range(1, 6)]
    rows[3]["eval_loss"], rows[0]["eval_loss"], rows[1]["entropy"] = 0.5, math.nan, 2.0
    found = logged(rows, Pace(5, 5, 1, 5), {2, 4}, [0.1, 0.2, 0.3])
    assert found == [
        {"loss": 1.5, "learning_rate": 0.2, "entropy": 2.0, "epoch": 0.4, "step": 2},
        {"loss": 3.5, "epoch": 0.8, "step": 4},
        {"eval_loss": 0.5, "epoch": 0.8, "step": 4},
    ]


def test_a_copy_of_a_model_takes_along_what_was_put_over_it():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    before = model.forward

    def doubled(x):
        return 2 * before(x)

    model.forward = doubled
    model[0].weight.grad = torch.ones(2, 2)
    other = copied(model)
    with torch.no_grad():
        other[0].weight.zero_()
        other[0].bias.zero_()
        other[1].bias.fill_(1.0)
    assert other[1].weight is other[0].weight
    assert other[0].weight.grad is None
    assert torch.equal(other(torch.ones(1, 2)), torch.full((1, 2), 2.0))
    assert model[0].weight.abs().sum() > 0
