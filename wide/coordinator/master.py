"""The model that is being trained, its optimizer, and the fold of a step's updates. Knows no sockets, no time."""

from __future__ import annotations

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind, join
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.seeding import generators, mix, seed_everything
from wide.strategy.tree import Block, TreeSum


class Master:
    """The one true copy of the weights. `begin`, `add` every block of the step, `update`: that is one version."""

    def __init__(self, job: Job, model: nn.Module, seed: int) -> None:
        self.job = job
        self.seed = seed
        self.model = model.cpu().train()
        self.layout = Layout(model)
        if not self.layout.trainable:
            raise TrainingFailed("the model has no trainable parameter: nothing to do")
        self.weights = Flat(self.layout, only_live=False)
        bind(model, self.weights, self.layout)
        by_name = dict(model.named_parameters())
        self._parameters = [by_name[slot.name] for slot in self.layout.trainable]
        with users_code("building the optimizer or its scheduler failed"):
            self.optimizer = job.optimizer(list(model.parameters()))
            self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        self._sum: TreeSum[Flat] = TreeSum(Block(0, 1), self._join)
        self._spare: list[Flat] = []
        self._settled: Flat | None = None

    def take_buffer(self) -> Flat:
        """Room for one update; `add` takes it over, `release` gives it back unused."""
        return self._spare.pop() if self._spare else Flat(self.layout, only_live=True)

    def release(self, flat: Flat) -> None:
        self._spare.append(flat)

    def begin(self, batches: int) -> None:
        self._sum = TreeSum(Block(0, batches), self._join)

    def add(self, block: Block, update: Flat) -> None:
        self._sum.add(block, update)

    def settle(self, debt: Flat) -> None:
        """What a codec had left out of earlier updates, from a node that is leaving: part of the next version."""
        debt.touched = sum(1 << i for i, owed in enumerate(debt.trainable) if owed.any())
        self._settled = debt if self._settled is None else self._join(self._settled, debt)

    def update(self, step: int) -> None:
        """All batches of this step are in: one step of the job's optimizer."""
        total = self._sum.take()
        if self._settled is not None:
            self._join(total, self._settled)
            self._settled = None
        for i, (parameter, gradient) in enumerate(zip(self._parameters, total.trainable, strict=True)):
            parameter.grad = gradient if total.touched >> i & 1 else None
        with generators, users_code("the optimizer's step failed"):
            seed_everything(mix(self.seed, step))  # for optimizers that add noise
            if self.job.clip_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self.job.clip_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
        with torch.no_grad():
            for run, change in zip(self.weights.averaged_runs, total.averaged_runs, strict=True):
                run.add_(change)
            self.weights.kept_raw.copy_(total.kept_raw)
        self.release(total)

    def _join(self, left: Flat, right: Flat) -> Flat:
        join(left, right)
        self.release(right)
        return left
