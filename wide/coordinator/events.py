"""What can happen to a pool (events, past tense) and what should be done about it (actions, imperative)."""

from __future__ import annotations

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
    """`problem` is empty when the numbers are sound."""

    node: int
    lease: int
    problem: str = ""


class WorkFailed(Event, frozen=True):
    """The user's code raised, or the node's machine did. `batch` is -1 if it was before any batch."""

    node: int
    lease: int
    batch: int
    problem: str
    details: str = ""


class StopRequested(Event, frozen=True):
    why: str


class Ticked(Event, frozen=True):
    """Time passed and nothing else happened."""


class Action(msgspec.Struct, frozen=True, gc=False):
    """Something to be done, in the order given."""


class GrantLease(Action, frozen=True):
    node: int
    lease: int
    step: int
    block: Block


class MergeUpdate(Action, frozen=True):
    """The update that just arrived counts."""

    node: int
    step: int
    block: Block


class RejectUpdate(Action, frozen=True):
    """The update that just arrived does not count."""

    node: int
    reason: str
    detail: str


class CloseStep(Action, frozen=True):
    """All batches of the step are merged: make the next version."""

    step: int


class DropNode(Action, frozen=True):
    node: int
    why: str


class EndRun(Action, frozen=True):
    """Training is over; `failure` says in one line why it failed, if it did."""

    why: str
    failure: str = ""
    details: str = ""
