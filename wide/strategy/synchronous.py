"""`sync`: one step after the other, the same bits from any pool. A version is made when all batches of a step are in.

A lease is a node of the tree over the step's batches, sized by its node's speed, smaller towards the end. The fold is
the tree's sum, then the job's optimizer: bit for bit what one machine would have computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Generic

from wide.job.schedule import Schedule
from wide.strategy.description import Measured, Setting, Stage, Strategy, Travel
from wide.strategy.fold import Merge, Model, U
from wide.strategy.policy import Cut, Made, Pace, Reached, Share
from wide.strategy.tree import Block, TreeSum, halves

TOLERANCE = 1.2


class OpenStep:
    """Which batches of a step are free, and how many are still missing. A buddy allocator over the tree's blocks,
    counted from `start`.
    """

    def __init__(self, batches: int, start: int = 0) -> None:
        self.batches = batches
        self.missing = batches  # not merged yet
        self.free = batches  # not leased, or given back
        self._free = [Block(start, start + batches)]

    @property
    def is_complete(self) -> bool:
        return self.missing == 0

    def cut(self, most: int) -> Block:
        """Take a free block of at most `most` batches; call only when some are `free`."""
        free = self._free
        at = self._best(most) if len(free) > 1 else 0
        block = free.pop(at)
        while block.size > most:
            block, rest = halves(block)
            if fitting(rest.size, most) > fitting(block.size, most):
                block, rest = rest, block
            self._free.insert(at, rest)
        self.free -= block.size
        return block

    def _best(self, most: int) -> int:
        """Of those that give most, the smallest, which is left in the fewest pieces."""
        at = best = smallest = 0
        for i, (first, end) in enumerate(self._free):
            size = end - first
            if size == most:
                return i
            fits = fitting(size, most)
            if fits > best or (fits == best and size < smallest):
                at, best, smallest = i, fits, size
        return at

    def give_back(self, block: Block) -> None:
        """Nobody computes this block any more: it is free again."""
        self.free += block.size
        self._free.append(block)
        self._free.sort()

    def keep_first(self, block: Block, batches: int) -> Block | None:
        """Only the first batches of a leased block will be answered: the others are free. Which they are; None, if
        these are no block of the tree.
        """
        kept, rest = block, []
        while kept.size > batches:
            kept, right = halves(kept)
            rest.append(right)
        if kept.size != batches:
            return None
        for piece in rest:
            self.give_back(piece)
        return kept

    def accept(self, block: Block) -> None:
        """The block's sum is in."""
        self.missing -= block.size


@lru_cache(maxsize=65536)
def fitting(size: int, most: int) -> int:
    """The largest block of at most `most` batches in a tree over so many."""
    return size if size <= most else max(fitting((size + 1) // 2, most), fitting(size // 2, most))


def lease_size(left: float, share: float, free: int, takers: int) -> int:
    """How many batches to lease: a node's share, by speed, of what is left. So leases shrink as a step ends.

    The tree has blocks of few sizes, so a lease is mostly smaller, and the next one makes up for it; but measured
    shares are noisy, so 3.5 batches count as 4. Never so many that another idle node would find nothing left.
    """
    return min(max(1, int(left * share * TOLERANCE)), math.ceil(free / takers))


class Synchronous:
    """The step that is open."""

    depth = 1
    is_worth_waiting = staticmethod(lambda due_within, batches_per_s: False)
    may_lease = staticmethod(lambda node: True)
    take_back = staticmethod(lambda block: False)  # what is given back here, nobody will answer
    discount = staticmethod(lambda staleness: 1.0)
    keep_first: Callable[[Block, int], Block | None]

    def __init__(self, stage: Stage) -> None:
        self._schedule, self._end_step = stage.schedule, stage.end_step
        self._next: OpenStep | None = None  # if some of it was leased ahead
        self._begin(stage.first_step)

    def _begin(self, number: int) -> None:
        self._number, self._start = number, self._schedule.position(number)
        self._open, self._next = self._next or self._step(number), None
        self.keep_first = self._open.keep_first

    def _step(self, number: int) -> OpenStep:
        return OpenStep(self._schedule.step(number).batches, self._schedule.position(number))

    @property
    def age(self) -> int:
        return self._number

    @property
    def pending(self) -> int:
        return self._open.batches - self._open.missing

    @property
    def free(self) -> int:
        return 0 if self.is_complete else self._open.free

    @property
    def is_complete(self) -> bool:
        return self._number == self._end_step

    @property
    def waits_for(self) -> str:
        return f"{self._open.missing} of {self._open.batches} batches of step {self._number}"

    def reached(self, out: Iterable[Block]) -> Reached:
        """A step that is not whole will be computed again."""
        return Reached(self._start, [])

    def cut(self, share: Share, at_work: Callable[[], float], now: float) -> Cut:
        """A newcomer gets one batch. What others are at counts as left while little of the step is free."""
        free, missing = self._open.free, self._open.missing
        if share.batches_per_s is None:
            return Cut(self._open.cut(1))
        left = missing if 2 * free > missing else free + at_work()
        return Cut(self._open.cut(lease_size(left, share.part, free, share.takers)))

    def cut_ahead(self, share: Share) -> Cut | None:
        """Of the next step; a newcomer gets nothing before its time."""
        if share.batches_per_s is None or (self._end_step is not None and self._number + 1 >= self._end_step):
            return None
        if self._next is None:
            self._next = self._step(self._number + 1)
        step = self._next
        return Cut(step.cut(lease_size(step.batches, share.part, step.free, 1))) if step.free else None

    def give_back(self, block: Block) -> None:
        step = self._open if self._next is None or block.first < self._start + self._open.batches else self._next
        step.give_back(block)

    def accept(self, node: int, block: Block, now: float) -> list[int]:
        self._open.accept(block)
        return [self._number] if self._open.is_complete else []

    def void(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._open.missing += block.size
            self._open.give_back(block)

    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool:
        return self._open.is_complete

    def make(self, pace: Callable[[], Pace], now: float, is_end: bool) -> Made:
        self._begin(self._number + 1)
        return Made(1.0)

    def end_soon(self) -> int:
        """What was leased ahead is done before that."""
        is_next_begun = self._next is not None and self._next.free < self._next.batches
        is_begun = self._open.free < self._open.batches or is_next_begun
        end = self._number + is_begun + is_next_begun
        self._end_step = end if self._end_step is None else min(self._end_step, end)
        return end


class TreeFold(Generic[U]):
    """The sum over the step's fixed tree, then the job's optimizer. It is gathered in no other way: it would not be
    exact.
    """

    def __init__(self, model: Model[U], schedule: Schedule, state: Any = None, gathering: Any = None) -> None:
        self._model, self._schedule = model, schedule
        self._sum: TreeSum[U] | None = None
        self._start = 0  # the position of the step's first batch

    def merge(self, merge: Merge, update: U) -> None:
        if self._sum is None:
            step = self._schedule.step_at(merge.block.first)
            self._start = self._schedule.position(step.number)
            self._sum = TreeSum(Block(0, step.batches), self._model.join)
        self._sum.add(Block(merge.block.first - self._start, merge.block.end - self._start), update)

    def make(self, made: Made, steps: int) -> None:
        assert self._sum is not None
        total, batches = self._model.with_debts(self._sum.take()), self._sum.root.size
        self._sum = None
        self._model.by_counts(total, batches)
        self._model.descend(total, steps)
        self._model.release(total)

    def void(self) -> None:
        if self._sum is not None:
            for update in self._sum.clear():
                self._model.release(update)
            self._sum = None

    def bring_back(self) -> None:
        """They are never anywhere else."""

    def state(self) -> Any:
        return None


def _forecast(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """In each step the slowest link is waited for, and the coordinator takes the updates one after the other. But who
    would hold the others up is not waited for: they compute its batches themselves.
    """
    nearest = sorted(zip(nodes, travel, strict=True), key=lambda pair: pair[1].both_s)
    best = rate = 0.0
    for count, (node, its) in enumerate(nearest, 1):
        rate += node.batches_per_s
        at_work = min(count, setting.batches_per_step)
        step_s = setting.batches_per_step / rate + its.both_s + at_work * setting.busy_s
        best = max(best, setting.batches_per_step / step_s)
    return best


SYNC = Strategy(
    name="sync",
    why="exact, and nearly as quick as any other",
    why_here="exact, and nearly as quick as any other",
    enough=0.9,
    update_role="gradient",
    needs_whole_steps=True,
    overlaps=False,
    counts_by_epoch=False,
    is_mean=False,
    measures_travel=True,
    takes_turns=True,
    memory=0.9,
    most_stale=0,
    policy=Synchronous,
    fold=TreeFold,
    forecast=_forecast,
)
