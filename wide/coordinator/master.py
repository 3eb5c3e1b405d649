"""The model that is being trained: the one true copy of its weights, and its optimizer. Knows no sockets, no time.

How updates become a version is the strategy's fold.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind, join, scale
from wide.codec.spare import Spare
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent


class Master:
    """The weights, and what is done to them."""

    def __init__(self, job: Job, model: nn.Module, seed: int) -> None:
        self.model = model.cpu()
        self.layout = Layout(model)
        if not self.layout.trainable:
            raise TrainingFailed("the model has no trainable parameter: nothing to do")
        self.weights = Flat(self.layout, only_live=False)
        bind(model, self.weights, self.layout)
        self.descent = Descent(job, model, [slot.name for slot in self.layout.trainable], seed)
        self.spare = Spare(self.layout)
        self.release = self.spare.give
        self._owed: Flat | None = None

    @property
    def trainable(self) -> Sequence[torch.Tensor]:
        return self.weights.trainable

    @property
    def named_views(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors of the model by their names, as views into the weights."""
        views = [*self.weights.trainable, *self.weights.averaged, *self.weights.kept, *self.weights.frozen]
        return [(slot.name, view) for slot, view in zip(self.layout.slots, views, strict=True)]

    def join(self, left: Flat, right: Flat) -> Flat:
        join(left, right)
        self.spare.give(right)
        return left

    def scale(self, update: Flat, factor: float) -> None:
        scale(update, factor)

    def owe(self, debt: Flat, weight: float) -> None:
        """What a codec had left out of earlier updates, from a node that is leaving: part of the next version."""
        scale(debt, weight)
        debt.touched = sum(1 << i for i, owed in enumerate(debt.trainable) if owed.any())
        self._owed = debt if self._owed is None else self.join(self._owed, debt)

    def forget_debts(self) -> None:
        if self._owed is not None:
            self.spare.give(self._owed)
            self._owed = None

    def with_debts(self, total: Flat) -> Flat:
        """A version's update, and what those owed who have left."""
        if self._owed is not None:
            self.join(total, self._owed)
            self._owed = None
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
