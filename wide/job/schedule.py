"""Which samples make which batch: that follows from the job's seed alone, never from the pool.

A batch has a position in the run: batch i of epoch e is the one at e · batches_per_epoch + i.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch

from wide.errors import TrainingFailed
from wide.job.seeding import mix


class Step(NamedTuple):
    """`batches` batches of one epoch, from the epoch's batch `first` on; one update of the model."""

    number: int
    epoch: int
    first: int
    batches: int
    samples: int
    is_last_of_epoch: bool


class Stretch(NamedTuple):
    """The batches first…end-1 of one step."""

    step: Step
    first: int
    end: int


class Schedule:
    """The order of all samples of a run."""

    def __init__(self, samples: int, batch_size: int, batches_per_step: int, seed: int) -> None:
        if samples < 1:
            raise TrainingFailed("the data set is empty (its length is 0): dataset() must return at least one sample")
        self.samples = samples
        self.batch_size = batch_size
        self.batches_per_step = batches_per_step
        self.seed = seed
        self.batches_per_epoch = math.ceil(samples / batch_size)
        self.steps_per_epoch = math.ceil(self.batches_per_epoch / batches_per_step)
        self._orders: dict[int, tuple[torch.Tensor, memoryview]] = {}
        self.step = lru_cache(maxsize=8)(self._step)  # asked for again and again, on the way of every gradient
        self._last = (self.step(0), 0)  # a step, and the position of its first batch: mostly the one that is wanted

    def steps_for(self, epochs: float) -> int:
        return max(1, math.ceil(epochs * self.steps_per_epoch - 1e-9))

    def _step(self, number: int) -> Step:
        epoch, within = divmod(number, self.steps_per_epoch)
        first = within * self.batches_per_step
        batches = min(self.batches_per_step, self.batches_per_epoch - first)
        samples = min((first + batches) * self.batch_size, self.samples) - first * self.batch_size
        return Step(number, epoch, first, batches, samples, within == self.steps_per_epoch - 1)

    def position(self, number: int) -> int:
        """Of a step's first batch."""
        epoch, within = divmod(number, self.steps_per_epoch)
        return epoch * self.batches_per_epoch + within * self.batches_per_step

    def step_at(self, position: int) -> Step:
        epoch, index = divmod(position, self.batches_per_epoch)
        return self.step(epoch * self.steps_per_epoch + index // self.batches_per_step)

    def stretches(self, first: int, end: int) -> list[Stretch]:
        """The positions first…end-1, step by step."""
        found = []
        while first < end:
            step, start = self._last
            if not start <= first < start + step.batches:
                step = self.step_at(first)
                start = self.position(step.number)
                self._last = step, start
            until = min(end, start + step.batches)
            found.append(Stretch(step, first - start, until - start))
            first = until
        return found

    def sizes(self, step: Step, first: int, end: int) -> list[int]:
        """How many samples each of the step's batches first…end-1 has: all alike but an epoch's last."""
        sizes = [self.batch_size] * (end - first)
        beyond = (step.first + end) * self.batch_size - self.samples
        if beyond > 0:
            sizes[-1] -= beyond
        return sizes

    def ids(self, step: Step, first: int, end: int) -> torch.Tensor:  # (samples,) int64, a view
        """The samples of the step's batches first…end-1, in order."""
        low, high = (step.first + first) * self.batch_size, (step.first + end) * self.batch_size
        return self._epoch(step.epoch)[0][low:high]

    def ids_as_bytes(self, step: Step, first: int, end: int) -> memoryview:
        """The same, as they are sent."""
        low, high = (step.first + first) * self.batch_size * 8, (step.first + end) * self.batch_size * 8
        return self._epoch(step.epoch)[1][low:high]

    def _epoch(self, epoch: int) -> tuple[torch.Tensor, memoryview]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(mix(self.seed, epoch))
            order = torch.randperm(self.samples, generator=generator)
            self._orders = {e: kept for e, kept in self._orders.items() if abs(e - epoch) == 1}  # leases may overlap
            self._orders[epoch] = (order, order.numpy().data.cast("B"))
        return self._orders[epoch]
