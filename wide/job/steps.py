"""`wide.local` as a Job: what is trained is the steps of a loop whose data nobody else knows. A step of the pool is so
many steps of one node.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from wide.errors import TrainingFailed
from wide.job.definition import Job, OwnLoop
from wide.job.order import sequential

STEPS_PER_EPOCH = 1000  # of the pool: a loop of one's own has no epochs that anybody could know


class Numbers:
    """In place of a data set: the numbers of a loop's steps."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> int:
        return number


class NoLoss:
    """In place of a loss."""

    def __init__(self, own_loop: OwnLoop) -> None:
        self.own_loop = own_loop

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        raise TrainingFailed("this job has no loss: a loop in a script computes, on nodes")


def job_of_steps(model: nn.Module, every: int, threads: int, loss: Any = None) -> Job:
    """`loss` is what a node has in its place."""
    return Job(
        model=lambda: model,
        dataset=lambda: Numbers(every * STEPS_PER_EPOCH),
        loss=loss if loss is not None else NoLoss(OwnLoop(every)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.0),  # nobody's: the loop has optimizers of its own
        batch_size=1,
        batches_per_step=every,
        order=sequential(),
        threads=threads,
    )
