"""A rank's copy of the model, where it is computed, and its optimizer. On a CPU both are the run's own (Master). On a
GPU they live there, and the run's follow when somebody wants to see them: for a checkpoint, or to evaluate.
"""

from __future__ import annotations

import copy

import torch

from wide.codec.layout import Flat, bind, by_counts
from wide.codec.spare import Spare
from wide.coordinator.master import Master
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent


class Replica:
    """`model`, its tensors in `weights`; `descend` makes a step."""

    def __init__(self, job: Job, master: Master, seed: int, device: torch.device, is_apart: bool) -> None:
        self._master, self.layout, self._is_apart = master, master.layout, is_apart
        self.model, self.weights, self.descent, self.spare = master.model, master.weights, master.descent, master.spare
        if is_apart:
            if job.after_step is not None:
                raise TrainingFailed("after_step on a GPU is for wide run: torch.distributed is given --device cpu")
            self.model = copy.deepcopy(master.model).to(device)
            self.weights = Flat(master.layout, only_live=False, device=device)
            bind(self.model, self.weights, master.layout)
            self.spare = Spare(master.layout, device)
            self.descent = Descent(job, self.model, [slot.name for slot in master.layout.trainable], seed)
            self.descent.go_on_from(master.descent.state())

    def descend(self, total: Flat, batches: int, steps: int, epoch: int) -> None:
        """The `steps`-th step, along this gradient of so many batches; it is given back."""
        by_counts(total, batches)
        if self._is_apart:
            self.descent.advance(steps - 1, epoch)
            self.descent.step(total.trainable, total.touched, steps - 1)
            self.descent.advance(steps, epoch)
            self._master.logged = total.logged
        else:
            self._master.descend(total, steps)
        self.spare.give(total)

    def come_home(self) -> None:
        """The run's own weights and optimizer become these."""
        if self._is_apart:
            self._master.weights.raw.copy_(self.weights.raw)
            self._master.descent.go_on_from(self.descent.state())
