"""training_step as a Job's loss: one batch, and what came of it."""

from __future__ import annotations

from typing import Any

import torch

from wide.errors import TrainingFailed
from wide.job.definition import total
from wide.job.here import here
from wide.lightning.kept import tidy
from wide.lightning.module import Notes, transferred


def loss(model: Any, batch: Any) -> Any:
    """If the job says how many batches make a step, each weighs the same, as Lightning has it. Else an update's samples
    are cut into batches that are alike but for one sample, and their means weigh as much as they have samples.
    """
    notes: Notes = model._wide
    for metric in notes.metrics:
        metric.reset()
    batch = transferred(model, batch)
    said = model.training_step(batch) if notes.takes == 1 else model.training_step(batch, _number(notes))
    if (notes.plan.batches_per_step or 1) == 1:
        for parameter in model.parameters():
            parameter.grad = None  # as Lightning has it, between the first training_step of an update and backward
    found = _loss(model, said)
    tidy(notes.keepers)
    return total(found, 1) if (notes.plan.batches_per_step or 1) > 1 else found


def _loss(model: Any, said: Any) -> Any:
    if isinstance(said, dict):
        if "loss" not in said:
            raise TrainingFailed(f'training_step returned a dict without "loss"; it has {", ".join(map(str, said))}')
        said = said["loss"]
    if said is None:  # no parameter has a gradient then, so the optimizer leaves all of them as they are
        return torch.zeros((), device=getattr(model, "device", None), requires_grad=True)
    return said


def _number(notes: Notes) -> int:
    """Of the loader's batch, in its epoch."""
    if not notes.asks:
        return 0
    place, steps = here(), notes.plan.steps_per_epoch
    step = place.step - place.epoch * steps if steps is not None else place.step
    each = notes.plan.batches_per_step
    return step if each is None else step * each + place.batch
