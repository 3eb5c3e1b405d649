"""`async`: no barrier. A lease is a few batches, and whenever a step's worth of them is in, the optimizer makes a step.

The fold is the mean of a step's worth of gradients, older ones discounted, then the job's optimizer. If that is plain
SGD, each gradient moves the weights as soon as it arrives, and momentum follows; with other optimizers nodes are sent
where the next steps will probably lead (delayed.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic

import torch

from wide.errors import TrainingFailed
from wide.job.model import MIXED
from wide.job.schedule import Schedule
from wide.strategy.delayed import Delayed
from wide.strategy.description import Measured, Setting, Stage, Strategy, Travel, speed
from wide.strategy.fold import Merge, Model, U
from wide.strategy.gather import Gather, Gathering, Part, Sum
from wide.strategy.line import OnLine
from wide.strategy.policy import Cut, Made, Pace, Share
from wide.strategy.tree import Block
from wide.telemetry.log import log

TINY = 1e-9
PATIENCE = 0.5  # a node waits for a step that will be whole within this part of the usual time
LATE_MEMORY = 0.95
LEAD = 4.0  # steps ahead, for each step that gradients are late; docs/findings.md


class Asynchronous(OnLine):
    """If the strategy is eager, each result makes a version of its own before its step is whole."""

    may_lease = staticmethod(lambda node: True)

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._is_eager, self._is_new = stage.is_eager, False

    @property
    def _missing(self) -> float:
        return (1 - self._filled) * self._schedule.batches_per_step

    @property
    def _whole(self) -> float:
        """Steps that are; an epoch's last one may be so short that a lease holds several."""
        return float(math.floor(self._filled + TINY))

    @property
    def waits_for(self) -> str:
        return f"{self._missing:.1f} batches of a step's worth"

    def is_worth_waiting(self, due_within: Callable[[float], int], batches_per_s: float) -> bool:
        """Will the step be whole in a moment? Then work begins with the new weights, and the nodes fall into step."""
        soon = due_within(PATIENCE * self._schedule.batches_per_step / batches_per_s)
        return soon > 0 and soon >= self._missing - 1e-6

    def cut(self, share: Share, at_work: Callable[[], float], now: float) -> Cut:
        """Half of what this node computes while the pool makes a step, so that nothing gets much older than one."""
        is_known = share.batches_per_s is not None
        wanted = round(self._schedule.batches_per_step * share.part / 2) if is_known else 1
        return Cut(self._line.cut(self._most(wanted, 1, share)))

    def accept(self, node: int, block: Block, now: float) -> list[int]:
        self._is_new = self._is_eager
        return self._accept(block)

    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool:
        return bool(self.pending) and (self._whole > 0 or self._is_new)

    def make(self, pace: Callable[[], Pace], now: float, is_end: bool) -> Made:
        worth = self._whole or (self._filled if is_end else 0.0)  # in the end a step is made of what is left
        made = Made(worth, is_step=self._whole > 0 or is_end)
        self._is_new = False
        if made.is_step:
            self._filled = max(0.0, self._filled - max(1.0, self._whole))  # the surplus counts for the next one
            self.pending = 0
            self.age += 1
        return made

    def discount(self, staleness: int) -> float:
        """The older, the less it says; but one step is what a pool without a barrier brings with it."""
        return 1 / math.sqrt(max(1, staleness))


class Side(Generic[U]):
    """Of a step's gradients those that are totals, or those that are means."""

    def __init__(self, gather: Gather[U]) -> None:
        self.gather = gather
        self.said: set[int] = set()  # the nodes that ever gave one
        self.begin()

    def begin(self) -> None:
        """A step."""
        self.weight = 0.0
        self.staleness = self.batches = 0  # of this step's gradients, in all; and of how many batches
        self.nodes: set[int] = set()


class MeanFold(Generic[U]):
    """Each batch weighs n/N of its step, so that a step's worth of batches is a mean; more or less is scaled to one.

    A job's losses are totals, or they are means. If nodes say both, the side of more nodes makes the step, and what the
    others gave is left out; the job itself is wrong where nobody has kept to one.
    """

    def __init__(self, model: Model[U], schedule: Schedule, state: Any = None, gathering: Gathering = Sum) -> None:
        self._model, self._schedule = model, schedule
        self._means, self._totals = Side[U](gathering(model)), Side[U](gathering(model))
        self._last: Side[U] | None = None  # that made a step, or was there first
        self._has_counted = self._has_told = False
        self._is_plain, self._delayed = model.descent.is_plain, Delayed(model.trainable)
        self._late = float(state or 0.0)  # its mean, over many steps: a lead that jumps is worse than none

    def merge(self, merge: Merge, update: U) -> None:
        share = sum(
            sum(self._schedule.sizes(step, first, end)) / step.samples
            for step, first, end in self._schedule.stretches(*merge.block)
        )
        side = self._totals if update.weights else self._means
        self._last = self._last or side
        side.weight += share
        side.staleness += merge.staleness * merge.block.size
        side.batches += merge.block.size
        side.nodes.add(merge.node)
        side.said.add(merge.node)
        if merge.discount != 1.0:
            self._model.scale(update, merge.discount)
        part = Part(merge.node, sum(update.weights) or share if update.weights else share)
        if side.gather.fit(update, part) and self._is_plain:
            rates = self._model.descent.rates
            self._delayed.push(update.trainable, [share / part.weight * rate for rate in rates])
        side.gather.add(update, part)

    def make(self, made: Made, steps: int) -> None:
        if not made.is_step:
            return  # it is there already
        self.bring_back()
        side = self._last = self._chosen()
        total = self._model.with_debts(side.gather.take())
        if abs(side.weight - 1.0) > TINY:
            self._model.scale(total, 1 / side.weight)
            total.weights = [weight / side.weight for weight in total.weights]
        counts = any(total.weights)
        if self._has_counted and not counts and total.weights:
            torch._foreach_zero_(total.trainable)  # nothing to learn, in this step: that is not the job's fault
            total.weights = []
        self._has_counted |= counts
        self._model.by_counts(total, side.batches)
        self._late += (1 - LATE_MEMORY) * (side.staleness / side.batches - self._late)
        side.begin()
        if self._is_plain or not self._late:
            self._model.descend(total, steps)
        else:
            before = [weight.clone() for weight in self._model.trainable]
            self._model.descend(total, steps)
            self._delayed.lead(before, LEAD * self._late)
        self._model.release(total)

    def _chosen(self) -> Side[U]:
        """The side that makes this step; what is on the other one is given back."""
        means, totals = self._means, self._totals
        if not (means.batches and totals.batches):
            return means if means.batches else totals
        if means.said == totals.said:
            raise TrainingFailed(MIXED)
        chosen, other = sorted((means, totals), key=lambda it: (len(it.nodes), it is self._last), reverse=True)
        if not self._has_told:
            self._has_told = True
            words = "means, others' are totals" if chosen is means else "totals (wide.total), others' are means"
            log.warning("most nodes' losses are %s: %d batches were left out of a step", words, other.batches)
        other.gather.void()
        other.begin()
        return chosen

    def void(self) -> None:
        self._delayed.restore()
        for side in (self._means, self._totals):
            side.gather.void()
            side.begin()

    def bring_back(self) -> None:
        """Nodes may be ahead of them."""
        self._delayed.restore()

    def state(self) -> Any:
        return self._late


def _forecast(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """Each node waits for its own link, after leases of half a step's share."""
    rate, leases, all_s = 0.0, 0.0, speed(nodes)
    for node, its in zip(nodes, travel, strict=True):
        lease = max(1.0, setting.batches_per_step * node.batches_per_s / all_s / 2)
        lease_s = lease / node.batches_per_s + its.both_s + setting.busy_s
        rate += lease / lease_s
        leases += 1 / lease_s
    return rate / max(1.0, leases * setting.busy_s)


ASYNC = Strategy(
    name="async",
    why="links are too slow to wait for all, but quick enough for every update (not exact: results depend on the pool)",
    why_here="steps are too short to wait for all of them (not exact: results depend on the pool)",
    enough=0.0,
    update_role="gradient",
    needs_whole_steps=False,
    overlaps=True,
    counts_by_epoch=True,
    is_mean=False,
    measures_travel=True,
    takes_turns=False,
    memory=0.8,
    most_stale=16,
    policy=Asynchronous,
    fold=MeanFold,
    forecast=_forecast,
)
