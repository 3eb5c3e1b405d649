"""What can happen to a pool (events, past tense) and what should be done about it (actions, imperative)."""

from __future__ import annotations

import math

import msgspec

from wide.strategy.tree import Block


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened."""


class NodeJoined(Event, frozen=True):
    node: int


class NodeLeft(Event, frozen=True):
    node: int
    why: str


class UpdateArrived(Event, frozen=True):
    """`problem` is empty when the numbers are sound. Computing took the node `compute_s`, by its own watch."""

    node: int
    lease: int
    problem: str = ""
    compute_s: float = math.inf


class WorkFailed(Event, frozen=True):
    """The user's code raised, or the node's machine did. `batch` of the lease, -1 if it was before any batch."""

    node: int
    lease: int
    batch: int
    problem: str
    details: str = ""


class LinkMeasured(Event, frozen=True):
    """To send a node new weights and to get its update takes this long."""

    node: int
    transfer_s: float


class StrategyChosen(Event, frozen=True):
    """Another strategy would suit this pool better."""

    strategy: str


class RunDiverged(Event, frozen=True):
    """The loss is far above where it began."""

    problem: str


class StopRequested(Event, frozen=True):
    why: str


class Ticked(Event, frozen=True):
    """Time passed and nothing else happened."""


class Action(msgspec.Struct, frozen=True, gc=False):
    """Something to be done, in the order given."""


class GrantLease(Action, frozen=True):
    """`block` are positions in the run; `group` batches make one step on the node (0: their gradient is wanted)."""

    node: int
    lease: int
    block: Block
    group: int = 0


class MergeUpdate(Action, frozen=True):
    """The update that just arrived counts, `discount` times, and will be part of `version`. Since its node was given
    weights, these have made `staleness` steps.
    """

    node: int
    block: Block
    version: int
    discount: float = 1.0
    staleness: int = 0


class RejectUpdate(Action, frozen=True):
    """The update that just arrived does not count."""

    node: int
    reason: str
    detail: str


class MakeVersion(Action, frozen=True):
    """Fold what was merged since the last version into it: then `steps` steps' worth of batches are in the weights. If
    nodes make steps of their own, each has made `length` of them. If there is not a step's worth (`is_step`), only what
    need not wait for it.
    """

    version: int
    steps: int
    length: int = 1
    is_step: bool = True


class CloseStep(Action, frozen=True):
    """All batches of the step are merged; in `sync` they were numbered within it."""

    step: int
    is_sync: bool = True


class ChangeStrategy(Action, frozen=True):
    """From now on updates are folded like this."""

    strategy: str


class DropNode(Action, frozen=True):
    node: int
    why: str


class EndRun(Action, frozen=True):
    """Training is over; `failure` says in one line why it failed, if it did."""

    why: str
    failure: str = ""
    details: str = ""
