"""All batches of a run in one line, leased from its front without waiting for steps. Knows positions; knows no nodes.

What was given back goes first. However the leases were cut, steps are reported as complete in their order.
"""

from __future__ import annotations

from wide.job.schedule import Schedule
from wide.strategy.tree import Block


class Line:
    """Which batches are free, leased and merged, from one step up to another (None: without end)."""

    def __init__(self, schedule: Schedule, first_step: int, end_step: int | None) -> None:
        self._schedule = schedule
        self.front = schedule.position(first_step)  # nobody was given this one yet
        self._limit = schedule.position(end_step) if end_step is not None else None
        self._returned: list[Block] = []
        self._out: set[Block] = set()
        self._step = first_step  # the first one that is not complete, and
        self._missing: dict[int, int] = {}  # how much is missing of those that were begun

    def resume(self, front: int, holes: list[Block]) -> None:
        """All before `front` was merged, but for the holes."""
        self.front, self._returned = front, sorted(holes)
        for step, first, end in self._schedule.stretches(self._schedule.position(self._step), front):
            self._missing[step.number] = step.batches - (end - first)
        for hole in holes:
            for step, first, end in self._schedule.stretches(*hole):
                self._missing[step.number] += end - first

    @property
    def holes(self) -> list[Block]:
        """What is leased, or was given back."""
        return sorted([*self._returned, *self._out])

    @property
    def free(self) -> int:
        """How many could be leased; never more than a large number."""
        ahead = 1 << 40 if self._limit is None else self._limit - self.front
        return ahead + sum(block.size for block in self._returned)

    @property
    def is_complete(self) -> bool:
        return not self._out and not self.free

    def end_soon(self) -> int:
        """Lease no further than to the end of the step that is being leased. Returns the step after it."""
        step = self._schedule.step_at(self.front)
        is_begun = self.front > self._schedule.position(step.number)
        end = step.number + is_begun
        limit = self._schedule.position(end)
        self._limit = limit if self._limit is None else min(self._limit, limit)
        return end

    def is_out(self, block: Block) -> bool:
        return block in self._out

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
        self._out.add(block)
        return block

    def give_back(self, block: Block) -> None:
        self._out.remove(block)
        self._returned.append(block)
        self._returned.sort()

    def keep_first(self, block: Block, batches: int) -> Block | None:
        """Only the first batches of a leased block will be answered: they are leased, the others free. Which they are;
        None, if they cannot be taken apart.
        """
        kept, rest = Block(block.first, block.first + batches), Block(block.first + batches, block.end)
        self._out.add(rest)
        self.give_back(rest)
        self._out.remove(block)
        self._out.add(kept)
        return kept

    def take_back(self, block: Block) -> bool:
        """It was given back, but here is its result: has nobody else been given any of it?"""
        if block not in self._returned:
            return False
        self._returned.remove(block)
        self._out.add(block)
        return True

    def accept(self, block: Block) -> list[int]:
        """The block is merged. Returns the steps that are complete by now, and all before them."""
        self._out.remove(block)
        for stretch in self._schedule.stretches(*block):
            number = stretch.step.number
            self._missing[number] = self._missing.get(number, stretch.step.batches) - (stretch.end - stretch.first)
        done = []
        while self._missing.get(self._step) == 0:
            del self._missing[self._step]
            done.append(self._step)
            self._step += 1
        return done
