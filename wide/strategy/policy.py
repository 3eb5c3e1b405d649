"""How a run's batches become leases and versions: the questions that the pool asks every strategy, and what is said in
answer. Knows positions, shares and time as plain numbers; what is computed, by whom, over which network, is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from wide.strategy.tree import Block


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


class Pace(NamedTuple):
    """How long the pool needs to compute a step's batches, how long weights and updates travel, how long the slowest
    node is at one batch.
    """

    tick_s: float
    transfer_s: float
    batch_s: float


class Reached(NamedTuple):
    """Where a policy is, right after a version was made: all batches before `front` are in the weights, but for
    `holes`; and what is in them beyond whole steps.
    """

    front: int
    holes: list[Block]
    filled: float = 0.0


class Made(NamedTuple):
    """What a version contains: `worth` steps of the run; each node has made `length` steps of its own for it. If it is
    no step, it is only what need not wait for one.
    """

    worth: float
    length: int = 1
    is_step: bool = True


class Policy(Protocol):
    """What the pool asks. What is leased is the pool's own knowledge (coordinator/leases.py); what is free is here."""

    @property
    def depth(self) -> int: ...  # leases that a node holds at once: the second begins while the first result travels
    @property
    def waits_for(self) -> str: ...  # what the next version waits for, in words
    @property
    def age(self) -> int: ...  # counts the weights' real moves: steps, or rounds
    @property
    def pending(self) -> int: ...  # batches merged, but not part of a version yet
    @property
    def free(self) -> int: ...  # batches that may be leased now
    @property
    def is_complete(self) -> bool: ...
    def reached(self, out: Iterable[Block]) -> Reached: ...  # `out` is leased

    def may_lease(self, node: int) -> bool: ...
    def is_worth_waiting(self, due_within: Callable[[float], int], batches_per_s: float) -> bool: ...
    def cut(self, share: Share, at_work: Callable[[], float], now: float) -> Cut: ...
    def cut_ahead(self, share: Share) -> Cut | None: ...  # for the next version, while this one waits for others
    def give_back(self, block: Block) -> None: ...
    def keep_first(self, block: Block, batches: int) -> Block | None: ...
    def take_back(self, block: Block) -> bool: ...

    def accept(self, node: int, block: Block, now: float) -> list[int]: ...  # the steps that are whole now
    def is_due(self, holders: Callable[[], set[int]], now: float) -> bool: ...
    def make(self, pace: Callable[[], Pace], now: float, is_end: bool) -> Made: ...
    def void(self, blocks: Iterable[Block]) -> None: ...  # they were accepted, and do not count: they are free again
    def discount(self, staleness: int) -> float: ...
    def end_soon(self) -> int: ...
