"""How updates become a version, one fold for each strategy: all on the same master, its weights and its optimizer.

sync: the sum over the step's fixed tree, then the job's optimizer.
async: the mean of a step's worth of gradients, older ones discounted, then the job's optimizer; if that is plain SGD,
each gradient moves the weights as soon as it arrives, and momentum follows; with other optimizers nodes are sent where
the next steps will probably lead (strategy/delayed.py).
local: the sample-weighted mean of the nodes' deltas, then outer Nesterov (strategy/outer.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from wide.codec.layout import Flat, scale
from wide.coordinator.events import MakeVersion, MergeUpdate
from wide.coordinator.master import Master
from wide.job.schedule import Schedule
from wide.strategy.delayed import Delayed
from wide.strategy.outer import Nesterov, momentum_for
from wide.strategy.tree import Block, TreeSum

LATE_MEMORY = 0.95
LEAD = 4.0  # steps ahead, for each step that gradients are late; docs/findings.md


class Fold(Protocol):
    """`merge` takes an update over; `make` makes the version of what was merged."""

    def merge(self, merge: MergeUpdate, update: Flat) -> None: ...
    def make(self, make: MakeVersion) -> None: ...
    def settle(self) -> None: ...  # the weights are what whole versions have made of them
    def state(self) -> Any: ...  # what it remembers from one version to the next; `resume` takes it back
    def resume(self, state: Any) -> None: ...


class SyncFold:
    """Bit for bit what one machine would have computed."""

    def __init__(self, master: Master, schedule: Schedule) -> None:
        self._master, self._schedule = master, schedule
        self._sum: TreeSum[Flat] | None = None
        self._start = 0

    def merge(self, merge: MergeUpdate, update: Flat) -> None:
        if self._sum is None:
            step = self._schedule.step_at(merge.block.first)
            self._start = self._schedule.position(step.number)
            self._sum = TreeSum(Block(0, step.batches), self._master.join)
        self._sum.add(Block(merge.block.first - self._start, merge.block.end - self._start), update)

    def make(self, make: MakeVersion) -> None:
        assert self._sum is not None
        total, self._sum = self._master.with_debts(self._sum.take()), None
        self._master.descend(total, make.steps)
        self._master.release(total)

    def settle(self) -> None:
        """They always are."""

    def state(self) -> Any:
        return None

    def resume(self, state: Any) -> None:
        """It remembers nothing."""


class AsyncFold:
    """Each batch weighs n/N of its step, so that a step's worth of batches is a mean; more or less is scaled to one."""

    def __init__(self, master: Master, schedule: Schedule) -> None:
        self._master, self._schedule = master, schedule
        self._total: Flat | None = None
        self._weight = 0.0
        self._is_plain, self._delayed = master.descent.is_plain, Delayed(master.weights.trainable)
        self._staleness = self._batches = 0  # of this step's gradients, in all; and of how many batches
        self._late = 0.0  # its mean, over many steps: a lead that jumps is worse than none

    def merge(self, merge: MergeUpdate, update: Flat) -> None:
        self._weight += sum(
            sum(self._schedule.sizes(step, first, end)) / step.samples
            for step, first, end in self._schedule.stretches(*merge.block)
        )
        self._staleness += merge.staleness * merge.block.size
        self._batches += merge.block.size
        if merge.discount != 1.0:
            scale(update, merge.discount)
        if self._is_plain:
            self._delayed.push(update.trainable, self._master.descent.rates)
        self._total = update if self._total is None else self._master.join(self._total, update)

    def make(self, make: MakeVersion) -> None:
        if not make.is_step:
            return  # it is there already
        assert self._total is not None
        self.settle()
        total, self._total = self._master.with_debts(self._total), None
        if abs(self._weight - 1.0) > 1e-9:
            scale(total, 1 / self._weight)
        self._weight = 0.0
        self._late += (1 - LATE_MEMORY) * (self._staleness / self._batches - self._late)
        self._staleness = self._batches = 0
        if self._is_plain or not self._late:
            self._master.descend(total, make.steps)
        else:
            before = [weight.clone() for weight in self._master.weights.trainable]
            self._master.descend(total, make.steps)
            self._delayed.lead(before, LEAD * self._late)
        self._master.release(total)

    def settle(self) -> None:
        """Nodes may be ahead of them."""
        self._delayed.restore()

    def state(self) -> Any:
        return self._late

    def resume(self, state: Any) -> None:
        self._late = state


class LocalFold:
    """An update is what a node's own steps changed: Δ = θ before − θ after, and of buffers after − before."""

    def __init__(self, master: Master, schedule: Schedule) -> None:
        self._master, self._schedule = master, schedule
        self._outer = Nesterov()
        self._total: Flat | None = None
        self._weight = 0.0  # in steps' worth of samples, so that sums stay within what half precision can hold

    def merge(self, merge: MergeUpdate, update: Flat) -> None:
        weight = self._weight_of(merge.block)
        self._weight += weight
        scale(update, weight * merge.discount)
        self._total = update if self._total is None else self._master.join(self._total, update)

    def make(self, make: MakeVersion) -> None:
        assert self._total is not None
        total, self._total = self._total, None
        scale(total, 1 / self._weight)
        self._weight = 0.0
        total = self._master.with_debts(total)
        self._outer.step(self._master.weights.trainable, total.trainable, momentum_for(make.length))
        self._master.descent.advance(make.steps)
        self._master.move_buffers(total)
        self._master.release(total)

    def settle(self) -> None:
        """They always are."""

    def state(self) -> Any:
        return self._outer.buffers

    def resume(self, state: Any) -> None:
        self._outer.buffers = state

    def _weight_of(self, block: Block) -> float:
        samples = sum(
            sum(self._schedule.sizes(step, first, end)) for step, first, end in self._schedule.stretches(*block)
        )
        return samples / (self._schedule.batch_size * self._schedule.batches_per_step)


FOLDS: dict[str, Callable[[Master, Schedule], Fold]] = {"sync": SyncFold, "async": AsyncFold, "local": LocalFold}
