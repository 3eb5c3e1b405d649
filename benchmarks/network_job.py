"""The digits and the 1.13 M parameters of `wide_job`, with an update after every four batches: the job for links that
are slower than the machines on them. The images come four times an epoch, so that an epoch has 180 batches and no step
fewer than four.
"""

from functools import cache

import msgspec
import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.wide_job import job as wide_job
from examples.digits import images_and_labels, training_set

REPEATS = 4
BATCHES_PER_STEP = 4


def repeated() -> TensorDataset:
    images, labels = training_set().tensors
    return TensorDataset(images.repeat(REPEATS, 1), labels.repeat(REPEATS))


@cache
def unseen() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = images_and_labels()
    return images[1437:], labels[1437:]


def held_out(model: nn.Module) -> dict[str, float]:
    images, labels = unseen()
    with torch.no_grad():
        scores = model(images)
    return {
        "held_out_loss": nn.functional.cross_entropy(scores, labels).item(),
        "accuracy": (scores.argmax(dim=1) == labels).float().mean().item(),
    }


job = msgspec.structs.replace(
    wide_job,
    dataset=repeated,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.02, momentum=0.9),
    batches_per_step=BATCHES_PER_STEP,
    evaluate=held_out,
)
