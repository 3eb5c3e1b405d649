"""`local`: rounds. Every node makes steps of the job's own optimizer, on its own batches, for about the same time; then
the outer optimizer (outer.py) moves the pool's weights along the sample-weighted mean of what those steps changed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic

from wide.job.schedule import Schedule
from wide.strategy.description import Measured, Setting, Stage, Strategy, Travel, speed
from wide.strategy.fold import Merge, Model, U
from wide.strategy.gather import Gathering, Part, Sum
from wide.strategy.line import OnLine
from wide.strategy.outer import Nesterov, momentum_for
from wide.strategy.policy import Cut, Made, Pace, Share
from wide.strategy.rounds import may_close
from wide.strategy.tree import Block

DURATIONS = 64
LEAST_LENGTH = 2
MOST_LENGTH = 500  # DiLoCo's
LEAST_ROUND_S = 0.1
LEAST_ROUNDS = 16  # of a run, even if the network would like fewer: averaging must have its effect
WORTH_OVERLAPPING = 0.1  # of a round, spent on travelling; what is less is waited for
MOST_BATCH_S = 5.0  # who does not look at its connection for longer must not be sent anything meanwhile
OVERLAP = 4.0  # a round takes this many times what an exchange of weights does, so that these are never very old


class Local(OnLine):
    """The round that is open."""

    is_worth_waiting = staticmethod(lambda due_within, batches_per_s: False)
    discount = staticmethod(lambda staleness: 1.0)

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        steps = MOST_LENGTH * LEAST_ROUNDS if stage.end_step is None else stage.end_step - stage.first_step
        self._length, self._most_length = LEAST_LENGTH, max(LEAST_LENGTH, steps // LEAST_ROUNDS)
        self._every = stage.schedule.batches_per_step if stage.are_steps_lent else 0
        self._round_s = 0.0  # how long it should take; 0: nothing is known yet
        self.waits_for = ""
        self._contributed: set[int] = set()
        self._awaited: set[int] = set()
        self._late: set[int] = set()
        self._opened_at: float | None = None  # with the first lease
        self._durations_s: deque[float] = deque(maxlen=DURATIONS)

    def may_lease(self, node: int) -> bool:
        """Who has contributed is given the next lease with the new weights. Where these travel for long, it has another
        one to go on with meanwhile.
        """
        return node not in self._contributed

    def cut(self, share: Share, at_work: Callable[[], float], now: float) -> Cut:
        """So many batches that the node will be done with them when a round ends, and all meet there: else whoever is
        first would wait a whole round for weights that are old by then. In each step of its own it takes its share of
        the job's batches_per_step.
        """
        if self._opened_at is None:
            self._opened_at = now
        if self._every:
            return Cut(self._line.cut(self._every), 1)
        if share.batches_per_s is None:
            return Cut(self._line.cut(1), 1)  # to see how quick it is
        group = max(1, round(self._schedule.batches_per_step * share.part))
        steps = max(1, round(self._until_end_s(share, now) * share.batches_per_s / group))
        return Cut(self._line.cut(self._most(steps * group, group, share)), group)

    def _until_end_s(self, share: Share, now: float) -> float:
        """From when this node will be free to the end of the round that it will then be in."""
        free_s = (share.held + 1) * self._round_s - self._waited_s(now) - share.busy_s
        return min(max(free_s, self._round_s / 4), 2 * self._round_s)

    def accept(self, node: int, block: Block, now: float) -> list[int]:
        self._contributed.add(node)
        self._late.discard(node)
        self._durations_s.append(self._waited_s(now))
        return self._accept(block)

    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool:
        if not self._contributed:
            self.waits_for = "a first contribution"
            return False
        present = holders()
        self._late &= present
        self._awaited = present - self._contributed - self._late
        arrived, awaited = len(self._contributed), len(self._awaited)
        is_due, self.waits_for = may_close(arrived, awaited, self._waited_s(now), self._durations_s)
        return is_due

    def _waited_s(self, now: float) -> float:
        """Since the round was opened."""
        return now - self._opened_at if self._opened_at is not None else 0.0

    def make(self, pace: Callable[[], Pace], now: float, is_end: bool) -> Made:
        made = Made(self._filled, self._every or self._length, is_step=self._filled > 0 or is_end)
        self._late |= self._awaited  # the next round does not wait for them
        self._awaited = set()
        self._contributed.clear()
        self._opened_at, self.pending, self._filled = now, 0, 0.0
        self.age += 1
        tick_s, transfer_s, batch_s = pace()
        self._length = min(round_length(tick_s, transfer_s), self._most_length)
        self._round_s = self._length * tick_s
        is_worth_it = transfer_s > WORTH_OVERLAPPING * self._round_s and batch_s < MOST_BATCH_S
        self.depth = 2 if is_worth_it else 1
        return made


def round_length(tick_s: float, transfer_s: float) -> int:
    """How many steps of the pool make a round, if one takes `tick_s` and weights and deltas travel for `transfer_s`."""
    if tick_s <= 0:
        return LEAST_LENGTH
    wanted = math.ceil(max(LEAST_ROUND_S, OVERLAP * transfer_s) / tick_s)
    return min(max(wanted, LEAST_LENGTH), MOST_LENGTH)


class OuterFold(Generic[U]):
    """An update is what a node's own steps changed: Δ = θ before − θ after, and of buffers after − before."""

    def __init__(self, model: Model[U], schedule: Schedule, state: Any = None, gathering: Gathering = Sum) -> None:
        self._model, self._schedule, self._gather = model, schedule, gathering(model)
        self._outer = Nesterov(state or [])
        self._weight = 0.0  # in steps' worth of samples, so that sums stay within what half precision can hold

    def merge(self, merge: Merge, update: U) -> None:
        weight = self._weight_of(merge.block)
        self._weight += weight
        self._model.scale(update, weight * merge.discount)
        part = Part(merge.node, weight, -(-merge.block.size // merge.group) if merge.group else 0)
        self._gather.fit(update, part)
        self._gather.add(update, part)

    def make(self, made: Made, steps: int) -> None:
        total = self._gather.take()
        self._model.scale(total, 1 / self._weight)
        self._weight = 0.0
        total = self._model.with_debts(total)
        self._outer.step(self._model.trainable, total.trainable, momentum_for(made.length))
        self._model.move_buffers(total)
        self._model.follow(total, steps)
        self._model.release(total)

    def void(self) -> None:
        self._gather.void()
        self._weight = 0.0

    def bring_back(self) -> None:
        """They are never anywhere else."""

    def state(self) -> Any:
        return self._outer.buffers

    def _weight_of(self, block: Block) -> float:
        samples = sum(
            sum(self._schedule.sizes(step, first, end)) for step, first, end in self._schedule.stretches(*block)
        )
        return samples / self._schedule.samples_per_step


def _forecast(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """Where weights and deltas travel for long, nobody waits for them, if they need less time than a round."""
    tick_s = setting.batches_per_step / speed(nodes)
    slowest_s = max(t.both_s for t in travel)
    round_s = round_length(tick_s, slowest_s) * tick_s
    waited_s = slowest_s if slowest_s <= WORTH_OVERLAPPING * round_s else 0.0
    return speed(nodes) * round_s / max(round_s + waited_s, slowest_s, len(nodes) * setting.busy_s)


LOCAL = Strategy(
    name="local",
    why="links, or the coordinator, are too slow for an update of every step (not exact: results depend on the pool)",
    why_here="the coordinator is too slow for an update of every step (not exact: results depend on the pool)",
    enough=0.9,  # it ends nearer to sync than async does
    update_role="delta",
    needs_whole_steps=False,
    overlaps=True,
    counts_by_epoch=True,
    is_mean=True,
    measures_travel=False,
    takes_turns=False,
    memory=0.4,
    most_stale=16,
    policy=Local,
    fold=OuterFold,
    forecast=_forecast,
)
