"""All batches of a run in one line, leased from its front without waiting for steps. Knows positions; knows no nodes.

What was given back goes first. However the leases were cut, steps are reported as complete in their order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from wide.strategy.description import Stage
from wide.strategy.policy import Reached, Share
from wide.strategy.tree import Block


class Line:
    """Which batches are free, and how many are leased, from one step up to another (None: without end)."""

    def __init__(self, stage: Stage) -> None:
        self._schedule = schedule = stage.schedule
        self.front = schedule.position(stage.first_step)  # nobody was given this one yet
        self._limit = schedule.position(stage.end_step) if stage.end_step is not None else None
        self._returned: list[Block] = []
        self._leased = 0
        self._step = stage.first_step  # the first one that is not complete, and
        self._missing: dict[int, int] = {}  # how much is missing of those that were begun
        if stage.reached is not None:
            self._begin_at(stage.reached)

    def _begin_at(self, reached: Reached) -> None:
        """All before its front was merged, but for the holes."""
        self.front, self._returned = reached.front, sorted(reached.holes)
        for step, first, end in self._schedule.stretches(self._schedule.position(self._step), self.front):
            self._missing[step.number] = step.batches - (end - first)
        for hole in reached.holes:
            for step, first, end in self._schedule.stretches(*hole):
                self._missing[step.number] += end - first

    def holes(self, out: Iterable[Block]) -> list[Block]:
        """What is leased, or was given back."""
        return sorted([*self._returned, *out])

    @property
    def free(self) -> int:
        """How many could be leased; never more than a large number."""
        ahead = 1 << 40 if self._limit is None else self._limit - self.front
        return ahead + sum(block.size for block in self._returned)

    @property
    def is_complete(self) -> bool:
        return not self._leased and not self.free

    def end_soon(self) -> int:
        """Lease no further than to the end of the step that is being leased. Returns the step after it."""
        step = self._schedule.step_at(self.front)
        is_begun = self.front > self._schedule.position(step.number)
        end = step.number + is_begun
        limit = self._schedule.position(end)
        self._limit = limit if self._limit is None else min(self._limit, limit)
        return end

    def cut(self, most: int) -> Block:
        """Take at most `most` batches; call only when some are free."""
        if self._returned:
            whole = self._returned.pop(0)
            block = Block(whole.first, min(whole.end, whole.first + most))
            if block.end < whole.end:
                self._returned.insert(0, Block(block.end, whole.end))
        else:
            end = self.front + most if self._limit is None else min(self.front + most, self._limit)
            block = Block(self.front, end)
            self.front = end
        self._leased += block.size
        return block

    def give_back(self, block: Block) -> None:
        self._leased -= block.size
        self._returned.append(block)
        self._returned.sort()

    def keep_first(self, block: Block, batches: int) -> Block | None:
        """Only the first batches of a leased block will be answered: the others are free. Which they are."""
        kept = Block(block.first, block.first + batches)
        self.give_back(Block(kept.end, block.end))
        return kept

    def take_back(self, block: Block) -> bool:
        """It was given back, but here is its result: has nobody else been given any of it?"""
        if block not in self._returned:
            return False
        self._returned.remove(block)
        self._leased += block.size
        return True

    def accept(self, block: Block) -> list[int]:
        """The block is merged. Returns the steps that are complete by now, and all before them."""
        self._leased -= block.size
        for stretch in self._schedule.stretches(*block):
            number = stretch.step.number
            self._missing[number] = self._missing.get(number, stretch.step.batches) - (stretch.end - stretch.first)
        done = []
        while self._missing.get(self._step) == 0:
            del self._missing[self._step]
            done.append(self._step)
            self._step += 1
        return done


class OnLine:
    """What policies that lease from one line share."""

    depth = 1
    cut_ahead = staticmethod(lambda share: None)  # versions do not wait here, and so
    void = staticmethod(lambda blocks: None)  # nothing is held back for long enough to be found wrong
    give_back: Callable[[Block], None]
    take_back: Callable[[Block], bool]
    keep_first: Callable[[Block, int], Block | None]
    end_soon: Callable[[], int]

    def __init__(self, stage: Stage) -> None:
        self._schedule = stage.schedule
        self._line = Line(stage)
        self.pending = self.age = 0
        self._filled = stage.reached.filled if stage.reached is not None else 0.0  # steps' worth since the last one
        self.give_back, self.end_soon = self._line.give_back, self._line.end_soon
        self.take_back, self.keep_first = self._line.take_back, self._line.keep_first

    @property
    def free(self) -> int:
        return self._line.free

    @property
    def is_complete(self) -> bool:
        return self._line.is_complete

    def reached(self, out: Iterable[Block]) -> Reached:
        return Reached(self._line.front, self._line.holes(out), self._filled)

    def _accept(self, block: Block) -> list[int]:
        for step, first, end in self._schedule.stretches(*block):
            self._filled += (end - first) / step.batches
        self.pending += block.size
        return self._line.accept(block)

    def _most(self, wanted: int, least: int, share: Share) -> int:
        """As much as wanted, but of the run's last batches no more than this node's share; so all end together."""
        return min(max(wanted, 1), max(least, math.ceil(self.free * share.part / 2)))
