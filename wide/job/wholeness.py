"""Is a batch's loss the mean of its parts' losses? If not (a contrastive loss, a sum, a BatchNorm), an update that is
cut into batches is not the update of one large batch. Tried on a few samples, and told, because nobody would notice.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wide.errors import WideError
from wide.job.definition import Job
from wide.job.here import Here, enter, leave
from wide.job.model import understood
from wide.job.samples import Samples
from wide.job.seeding import mix, seed_everything, states

SAMPLES = 8
TOLERANCE = 1e-3
WHOLE = "batches_per_step=1 keeps updates whole"


def remark(job: Job, model: nn.Module, samples: Samples, seed: int, pieces: int) -> str:
    """What a job's owner should know of updates that are cut into so many batches; empty: nothing."""
    size = samples.batch_size
    if job.batches_per_step is not None or pieces < 2:
        return ""
    if any(isinstance(module, _BatchNorm) for module in model.modules()):
        return f"an update of {size} samples is cut into {pieces} batches, and BatchNorm sees one at a time; {WHOLE}"
    if samples.stream is not None or len(samples) < SAMPLES:
        return ""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        middle = SAMPLES // 2
        cuts = ((0, SAMPLES), (0, middle), (middle, SAMPLES))
        said = [_loss(job, model, samples, seed, *cut) for cut in cuts]
    except (Exception, SystemExit):  # it will fail again, where it can be told which batch it was
        return ""
    finally:
        leave()
        for module, was_training in modes:
            module.training = was_training
        model.zero_grad(set_to_none=True)
    if None in said:
        return ""
    (whole, _), *parts = (found for found in said if found is not None)
    mean = sum(loss * weight for loss, weight in parts) / sum(weight for _, weight in parts)
    if math.isclose(whole, mean, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
        return ""
    return (
        f"the loss of {SAMPLES} samples is {whole:.4g}, the mean of their halves' {mean:.4g}: an update of {size} is "
        f"cut into {pieces} batches, so a loss that compares samples, or is a sum, is another one; {WHOLE}"
    )


def _loss(job: Job, model: nn.Module, samples: Samples, seed: int, first: int, end: int) -> tuple[float, float] | None:
    """And what it counts for. None, if it depends on random numbers."""
    batch = samples.batch(torch.arange(first, end), mix(seed, 0, 0))
    seed_everything(seed)
    before = states()
    enter(Here(0, steps=1))
    try:
        said = understood(job.turns[0].loss(model, batch))
    except WideError:
        return None
    count = float(end - first) if said.over is None else said.over
    return (said.mean, count) if states() == before else None
