"""How a run's batches become leases and versions: what a strategy decides about work. Knows positions, shares and time
as plain numbers; what is computed, and by whom over which network, is not known here.

Each course answers the same questions: what to lease next, whether a result still counts, whether a version is due.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from wide.job.schedule import Schedule
from wide.strategy.line import Line
from wide.strategy.rounds import may_close
from wide.strategy.sync import OpenStep, lease_size
from wide.strategy.tree import Block

TINY = 1e-9
PATIENCE = 0.5
DURATIONS = 64
LEAST_LENGTH = 2
MOST_LENGTH = 500  # DiLoCo's
LEAST_ROUND_S = 0.1
LEAST_ROUNDS = 16  # of a run, even if the network would like fewer: averaging must have its effect
WORTH_OVERLAPPING = 0.1  # of a round, spent on travelling; what is less is waited for
MOST_BATCH_S = 5.0  # who does not look at its connection for longer must not be sent anything meanwhile
OVERLAP = 4.0  # a round takes this many times what an exchange of weights does, so that these are never very old


class Cut(NamedTuple):
    """A lease to be granted; `group` batches make one step of the node's own (0: it makes none)."""

    block: Block
    group: int = 0


class Share(NamedTuple):
    """A node that is about to be given work: its part of the pool's speed, the idle nodes that are still to be served,
    and, if it was ever measured, its speed and what it is at.
    """

    part: float
    takers: int = 1
    batches_per_s: float | None = None
    held: int = 0  # leases that it has, and
    busy_s: float = 0.0  # for how long they will keep it
    at_work: float = 0.0  # batches that the others, and it, will still have to compute of what is out

    @property
    def is_known(self) -> bool:
        return self.batches_per_s is not None


class Pace(NamedTuple):
    """How long the pool needs to compute a step's batches, how long weights and updates travel, how long the slowest
    node is at one batch.
    """

    tick_s: float
    transfer_s: float
    batch_s: float


class Standing(NamedTuple):
    """Where a course is, right after a version was made: all batches before `front` are in the weights, but for
    `holes`; and what is in them beyond whole steps.
    """

    front: int
    holes: list[Block]
    filled: float = 0.0


class Course(Protocol):
    """What the coordinator asks."""

    name: str
    depth: int  # leases that a node holds at once: with two, the next one begins while the last result travels
    memory: float  # how much of a node's measured speed is kept when a new measurement comes
    most_stale: int  # what was granted so many ages ago is not merged
    may_flush: bool  # may a version be made of what is pending, if the run has to end?
    length: int  # steps that each node makes by itself for a version
    waits_for_travel: bool  # is what a node can do limited by its link, too?
    patience: float  # a node waits for a step that will be whole within this part of the usual time
    filled: float  # steps' worth of batches since the last one

    @property
    def age(self) -> int: ...  # counts the weights' real moves: steps, or rounds
    @property
    def missing(self) -> float: ...  # batches, until the step is whole
    @property
    def pending(self) -> int: ...  # batches merged, but not part of a version yet
    @property
    def worth(self) -> float: ...  # how many of the run's steps are in the version that is due
    @property
    def free(self) -> int: ...
    @property
    def is_complete(self) -> bool: ...
    @property
    def standing(self) -> Standing: ...
    def resume(self, standing: Standing) -> None: ...
    def may_lease(self, node: int) -> bool: ...
    def cut(self, share: Share, now: float) -> Cut: ...
    def is_out(self, block: Block) -> bool: ...
    def give_back(self, block: Block) -> None: ...
    def keep_first(self, block: Block, batches: int) -> Block | None: ...
    def take_back(self, block: Block) -> bool: ...
    def accept(self, node: int, block: Block, now: float) -> list[int]: ...
    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool: ...
    def version_made(self, pace: Pace, now: float, is_step: bool) -> None: ...
    def end_soon(self) -> int: ...
    def discount(self, staleness: int) -> float: ...


class Synchronous:
    """One step after the other: a version is made when all batches of a step are merged."""

    name, depth, memory, most_stale, length, worth, patience = "sync", 1, 0.9, 0, 1, 1.0, 0.0
    may_flush, waits_for_travel, filled = False, True, 0.0
    is_out: Callable[[Block], bool]
    give_back: Callable[[Block], None]
    keep_first: Callable[[Block, int], Block | None]

    def __init__(self, schedule: Schedule, first_step: int, end_step: int | None) -> None:
        self._schedule, self._end_step = schedule, end_step
        self._number = first_step
        self._begin()

    def _begin(self) -> None:
        self._start = self._schedule.position(self._number)
        self._open = OpenStep(self._schedule.step(self._number).batches, self._start)
        self.is_out, self.give_back, self.keep_first = self._open.is_out, self._open.give_back, self._open.keep_first

    @property
    def age(self) -> int:
        return self._number

    @property
    def missing(self) -> float:
        return self._open.missing

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
    def standing(self) -> Standing:
        """A step that is not whole will be computed again."""
        return Standing(self._start, [])

    def resume(self, standing: Standing) -> None:
        """It stands where its first step begins."""

    def may_lease(self, node: int) -> bool:
        return True

    def cut(self, share: Share, now: float) -> Cut:
        part = share.part if share.is_known else 0.0  # a newcomer gets one batch
        left = self._open.free + share.at_work
        return Cut(self._open.cut(lease_size(left, part, self._open.free, share.takers)))

    def take_back(self, block: Block) -> bool:
        return False  # what is given back here, nobody will answer

    def accept(self, node: int, block: Block, now: float) -> list[int]:
        self._open.accept(block)
        return [self._number] if self._open.is_complete else []

    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool:
        return self._open.is_complete

    def version_made(self, pace: Pace, now: float, is_step: bool) -> None:
        self._number += 1
        self._begin()

    def end_soon(self) -> int:
        is_begun = self._open.free < self._open.batches
        end = self._number + is_begun
        self._end_step = end if self._end_step is None else min(self._end_step, end)
        return end

    def discount(self, staleness: int) -> float:
        return 1.0


class _OnLine:
    """What asynchronous and local training share: leases from one line."""

    may_flush, waits_for_travel = True, True

    def __init__(self, schedule: Schedule, first_step: int, end_step: int | None) -> None:
        self._schedule = schedule
        self._line = Line(schedule, first_step, end_step)
        self.pending = self.age = 0
        self.filled = 0.0  # steps' worth of batches since the last version
        self.is_out, self.give_back, self.end_soon = self._line.is_out, self._line.give_back, self._line.end_soon
        self.take_back, self.keep_first = self._line.take_back, self._line.keep_first

    def resume(self, standing: Standing) -> None:
        """From where another one stood."""
        self._line.resume(standing.front, standing.holes)
        self.filled = standing.filled

    @property
    def standing(self) -> Standing:
        return Standing(self._line.front, self._line.holes, self.filled)

    @property
    def missing(self) -> float:
        return (1 - self.filled) * self._schedule.batches_per_step

    @property
    def free(self) -> int:
        return self._line.free

    @property
    def is_complete(self) -> bool:
        return self._line.is_complete

    is_out: Callable[[Block], bool]
    give_back: Callable[[Block], None]
    take_back: Callable[[Block], bool]
    keep_first: Callable[[Block, int], Block | None]
    end_soon: Callable[[], int]

    def _accept(self, block: Block) -> list[int]:
        for step, first, end in self._schedule.stretches(*block):
            self.filled += (end - first) / step.batches
        self.pending += block.size
        return self._line.accept(block)

    def _most(self, wanted: int, least: int, share: Share) -> int:
        """As much as wanted, but of the run's last batches no more than this node's share; so all end together."""
        return min(max(wanted, 1), max(least, math.ceil(self.free * share.part / 2)))


class Asynchronous(_OnLine):
    """No barrier: a lease is a few batches, and whenever a step's worth of them is in, the optimizer makes a step. If
    the strategy is eager, each result makes a version of its own before that.
    """

    name, depth, memory, most_stale, length, patience = "async", 1, 0.8, 16, 1, PATIENCE

    def __init__(self, schedule: Schedule, first_step: int, end_step: int | None, is_eager: bool = False) -> None:
        super().__init__(schedule, first_step, end_step)
        self._is_eager, self._is_new = is_eager, False

    @property
    def worth(self) -> float:
        """Whole steps; an epoch's last one may be so short that a lease holds several."""
        return float(math.floor(self.filled + TINY))

    def may_lease(self, node: int) -> bool:
        return True

    def cut(self, share: Share, now: float) -> Cut:
        """Half of what this node computes while the pool makes a step, so that nothing gets much older than one."""
        wanted = round(self._schedule.batches_per_step * share.part / 2) if share.is_known else 1
        return Cut(self._line.cut(self._most(wanted, 1, share)))

    def accept(self, node: int, block: Block, now: float) -> list[int]:
        self._is_new = self._is_eager
        return self._accept(block)

    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool:
        return bool(self.pending) and (self.worth > 0 or self._is_new)

    def version_made(self, pace: Pace, now: float, is_step: bool) -> None:
        self._is_new = False
        if is_step:
            self.filled = max(0.0, self.filled - max(1.0, self.worth))  # the surplus counts for the next one
            self.pending = 0
            self.age += 1

    def discount(self, staleness: int) -> float:
        """The older, the less it says; but one step is what a pool without a barrier brings with it."""
        return 1 / math.sqrt(max(1, staleness))


class Local(_OnLine):
    """Rounds: every node makes steps of its own, on its own batches, for about the same time; then all are averaged."""

    name, memory, most_stale, patience, waits_for_travel = "local", 0.4, 16, 0.0, False

    def __init__(self, schedule: Schedule, first_step: int, end_step: int | None) -> None:
        super().__init__(schedule, first_step, end_step)
        self.length = LEAST_LENGTH
        steps = MOST_LENGTH * LEAST_ROUNDS if end_step is None else end_step - first_step
        self._most_length = max(LEAST_LENGTH, steps // LEAST_ROUNDS)
        self._round_s = 0.0  # how long it should take; 0: nothing is known yet
        self.depth = 1
        self._contributed: set[int] = set()
        self._awaited: set[int] = set()
        self._late: set[int] = set()
        self._opened_at: float | None = None  # with the first lease
        self._durations_s: deque[float] = deque(maxlen=DURATIONS)

    @property
    def worth(self) -> float:
        return self.filled

    def may_lease(self, node: int) -> bool:
        """Who has contributed is given the next lease with the new weights. Where these travel for long, it has another
        one to go on with meanwhile.
        """
        return node not in self._contributed

    def cut(self, share: Share, now: float) -> Cut:
        """So many batches that the node will be done with them when a round ends, and all meet there: else whoever is
        first would wait a whole round for weights that are old by then. In each step of its own it takes its share of
        the job's batches_per_step.
        """
        if self._opened_at is None:
            self._opened_at = now
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
            return False
        present = holders()
        self._late &= present
        self._awaited = present - self._contributed - self._late
        return may_close(len(self._contributed), len(self._awaited), self._waited_s(now), self._durations_s)[0]

    def _waited_s(self, now: float) -> float:
        """Since the round was opened."""
        return now - self._opened_at if self._opened_at is not None else 0.0

    def version_made(self, pace: Pace, now: float, is_step: bool) -> None:
        self._late |= self._awaited  # the next round does not wait for them
        self._awaited = set()
        self._contributed.clear()
        self._opened_at, self.pending, self.filled = now, 0, 0.0
        self.age += 1
        self.length = min(round_length(pace.tick_s, pace.transfer_s), self._most_length)
        self._round_s = self.length * pace.tick_s
        is_worth_it = pace.transfer_s > WORTH_OVERLAPPING * self._round_s and pace.batch_s < MOST_BATCH_S
        self.depth = 2 if is_worth_it else 1

    def discount(self, staleness: int) -> float:
        return 1.0


def round_length(tick_s: float, transfer_s: float) -> int:
    """How many steps of the pool make a round, if one takes `tick_s` and weights and deltas travel for `transfer_s`."""
    if tick_s <= 0:
        return LEAST_LENGTH
    wanted = math.ceil(max(LEAST_ROUND_S, OVERLAP * transfer_s) / tick_s)
    return min(max(wanted, LEAST_LENGTH), MOST_LENGTH)


def course(strategy: str, schedule: Schedule, first_step: int, end_step: int | None, is_eager: bool) -> Course:
    """The named strategy's, from one step up to another."""
    if strategy == "async":
        return Asynchronous(schedule, first_step, end_step, is_eager)
    return (Local if strategy == "local" else Synchronous)(schedule, first_step, end_step)
