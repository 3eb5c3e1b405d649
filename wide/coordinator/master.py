"""The model that is being trained: the one true copy of its weights, and its optimizer. Knows no sockets, no time.

How updates become a version is its fold's (folds.py).
"""

from __future__ import annotations

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind, join
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent


class Master:
    """The weights, and spare room for updates."""

    def __init__(self, job: Job, model: nn.Module, seed: int) -> None:
        self.model = model.cpu().train()
        self.layout = Layout(model)
        if not self.layout.trainable:
            raise TrainingFailed("the model has no trainable parameter: nothing to do")
        self.weights = Flat(self.layout, only_live=False)
        bind(model, self.weights, self.layout)
        self.descent = Descent(job, model, [slot.name for slot in self.layout.trainable], seed)
        self._spare: list[Flat] = []
        self._settled: Flat | None = None

    def take_buffer(self) -> Flat:
        """Room for one update; a fold takes it over, `release` gives it back unused."""
        return self._spare.pop() if self._spare else Flat(self.layout, only_live=True)

    def release(self, flat: Flat) -> None:
        self._spare.append(flat)

    def join(self, left: Flat, right: Flat) -> Flat:
        join(left, right)
        self.release(right)
        return left

    def settle(self, debt: Flat) -> None:
        """What a codec had left out of earlier updates, from a node that is leaving: part of the next version."""
        debt.touched = sum(1 << i for i, owed in enumerate(debt.trainable) if owed.any())
        self._settled = debt if self._settled is None else self.join(self._settled, debt)

    def forget_debts(self) -> None:
        self._settled = None

    def with_debts(self, total: Flat) -> Flat:
        """A version's update, and what those owed who have left."""
        if self._settled is not None:
            self.join(total, self._settled)
            self._settled = None
        return total

    def descend(self, total: Flat, steps: int) -> None:
        """One step of the job's optimizer along this gradient, the `steps`-th."""
        self.descent.advance(steps - 1)  # if others made steps meanwhile
        self.descent.step(total.trainable, total.touched, steps - 1)
        self.descent.advance(steps)
        self.move_buffers(total)

    def move_buffers(self, total: Flat) -> None:
        with torch.no_grad():
            for run, change in zip(self.weights.averaged_runs, total.averaged_runs, strict=True):
                run.add_(change)
            self.weights.kept_raw.copy_(total.kept_raw)
