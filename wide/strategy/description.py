"""A strategy in one place: everything in which it differs from the others. Knows no strategy by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from wide.job.schedule import Schedule
from wide.strategy.fold import Fold, Model
from wide.strategy.gather import Gathering
from wide.strategy.policy import Policy, Reached


class Travel(NamedTuple):
    """How long an update, and new weights, are on their way."""

    up_s: float
    down_s: float

    @property
    def both_s(self) -> float:
        return self.up_s + self.down_s


@dataclass(frozen=True)
class Measured:
    """One node: its speed, and what each codec makes of its link."""

    node: int
    name: str
    batches_per_s: float
    travel: dict[str, Travel]
    is_here: bool = False  # it runs beside the coordinator, and has no link


@dataclass(frozen=True)
class Setting:
    """What is the same for all nodes."""

    batches_per_step: int
    busy_s: float


class Stage(NamedTuple):
    """The part of a run that a policy is for: from one step up to another (None: without end). `reached` is given if
    something of it is merged already. `is_eager`: parts of a step's gradient may be applied one by one.
    `are_steps_lent`: a lease is one step of the schedule, as it is.
    """

    schedule: Schedule
    first_step: int
    end_step: int | None
    is_eager: bool = False
    reached: Reached | None = None
    are_steps_lent: bool = False


@dataclass(frozen=True)
class Strategy:
    """Who else asks for a strategy's name than to look this up, or to print it, has something to move here."""

    name: str
    why: str  # it may suit a pool
    why_here: str  # it may suit one machine, where there are no links
    enough: float  # of the quickest strategy's speed, for a plan to prefer this one to those later in the catalogue
    update_role: Literal["gradient", "delta"]  # what an update is
    needs_whole_steps: bool  # no version is made of less than a step, not even at the end
    overlaps: bool  # nodes compute while updates and weights travel, and so keep versions apart from their model
    counts_by_epoch: bool  # the ledger numbers batches within the epoch, not within the step
    is_mean: bool  # a version is the mean of its updates, not their sum
    measures_travel: bool  # what a node can do is limited by its link, too
    takes_turns: bool  # of nodes that share a machine, no more work at once than it has cores
    memory: float  # how much of a node's measured speed is kept when a new measurement comes
    most_stale: int  # what was granted so many ages ago is not merged
    policy: Callable[[Stage], Policy]
    fold: Callable[[Model[Any], Schedule, Any, Gathering], Fold[Any]]  # what it remembers, how it adds up
    forecast: Callable[[list[Measured], list[Travel], Setting], float]  # batches/s


def speed(nodes: list[Measured]) -> float:
    return sum(node.batches_per_s for node in nodes)
