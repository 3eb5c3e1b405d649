"""What can happen to a pool (events, past tense) and what should be done about it (actions, imperative)."""

from __future__ import annotations

import math
from collections.abc import Hashable

import msgspec

from wide.strategy.policy import Made
from wide.strategy.tree import Block


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that happened."""


class NodeJoined(Event, frozen=True):
    """It can be given work. It runs on this machine, which has so many cores for nodes; "": nobody knows. It was let in
    as `known_as`, which a new number does not change; "": by the pool's token, or as its own child.
    """

    node: int
    machine: str = ""
    cores: int = 0
    known_as: str = ""


class NodeLeft(Event, frozen=True):
    node: int
    why: str
    died: bool = False  # its connection ended without a word


class NodeSilent(Event, frozen=True):
    """Nothing was heard of a node for several heartbeats, but its connection has not ended."""

    node: int


class NodeHeard(Event, frozen=True):
    """A silent node is back."""

    node: int


class UpdateArrived(Event, frozen=True):
    """`problem` is empty when the numbers are sound. Computing took the node `compute_s`, by its own watch. A node that
    has to go may hand in only the first `batches` of its lease.
    """

    node: int
    lease: int
    problem: str = ""
    compute_s: float = math.inf
    batches: int | None = None
    digest: Hashable = 0  # two that are alike to the bit have the same
    distance: float | None = None  # from its pair's other answer, where 1 is allowed; None: there is none yet
    doubt: str = ""  # it is sound, but unlike what others send: why


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


class EvaluationFull(Event, frozen=True):
    """So many weights wait to be evaluated that there is no room for more."""


class EvaluationCaughtUp(Event, frozen=True):
    """There is room again."""


class PauseRequested(Event, frozen=True):
    """By the run's owner: what is out is still merged, and nothing more is leased."""


class ResumeRequested(Event, frozen=True):
    """It goes on."""


class CheckpointRequested(Event, frozen=True):
    """Now, and not when it is time."""


class Judged(Event, frozen=True):
    """A model that was waited for is evaluated: should training end, and why? Is it the best so far?"""

    why_stop: str = ""
    is_best: bool = False


class RunFailed(Event, frozen=True):
    """Training cannot go on: its loss is far above where it began, or something broke beside it."""

    problem: str
    details: str = ""


class StopRequested(Event, frozen=True):
    why: str


class Ticked(Event, frozen=True):
    """Time passed and nothing else happened."""


class Position(msgspec.Struct, frozen=True):
    """Where a run is, right after a version was made. All batches before `front` are in the weights, but for `holes`;
    `steps` of the schedule are whole, and so many steps' worth are in the weights; it took `seconds`.
    """

    strategy: str = "sync"
    version: int = 0
    steps: int = 0
    worth: float = 0.0
    front: int = 0
    holes: list[Block] = []
    filled: float = 0.0
    seconds: float = 0.0


class Action(msgspec.Struct, frozen=True, gc=False):
    """Something to be done, in the order given."""


class GrantLease(Action, frozen=True):
    """`block` are positions in the run; `group` batches make one step on the node (0: their gradient is wanted). It is
    to be computed with `version` of the weights, as `strategy` says; on this core of a machine that is full, if any.
    """

    node: int
    lease: int
    block: Block
    group: int
    version: int
    strategy: str
    core: int = -1
    is_check: bool = False  # the answer is not merged, but compared: with what was,
    pair: int = 0  # or with that of the other node of this pair


class MergeUpdate(Action, frozen=True):
    """The update for this lease counts, `discount` times, and will be part of `version`. Since its node was given
    weights, these have made `staleness` steps.
    """

    node: int
    lease: int
    block: Block
    version: int
    discount: float = 1.0
    staleness: int = 0
    granted_at: float | None = None
    group: int = 0  # of its batches are one step of the node's own


class RejectUpdate(Action, frozen=True):
    """What this node said about this lease does not count. `block` was leased, and when, if it was this node's."""

    node: int
    lease: int
    reason: str
    detail: str
    block: Block | None = None
    granted_at: float | None = None


class CompareUpdate(Action, frozen=True):
    """This update was only computed to be compared with another one: it can go; or it waits for the other of its pair,
    if that has not come yet.
    """

    node: int
    lease: int
    block: Block
    granted_at: float
    pair: int = 0
    is_kept: bool = False


class Confirm(Action, frozen=True):
    """What a node computed for these batches was computed by another one, too: to the same bits."""

    node: int
    block: Block
    by: int


class TellOf(Action, frozen=True):
    """Something was decided about a node, for this reason."""

    node: int
    kind: str
    words: str


class NameNode(Action, frozen=True):
    """It computes something else than others do: it is sent away for good."""

    node: int
    words: str


class VoidVersion(Action, frozen=True):
    """What was merged for this version, which is not made yet, does not count: all of it is computed again."""

    version: int


class MakeVersion(Action, frozen=True):
    """Fold what was merged since `version` into the next one, after which `steps` steps' worth are in the weights."""

    version: int
    made: Made
    steps: int


class CloseStep(Action, frozen=True):
    """All batches of the step are merged. It is to be evaluated, perhaps."""

    step: int
    is_evaluated: bool = False


class ChangeStrategy(Action, frozen=True):
    """From now on updates are folded like this."""

    strategy: str


class SaveCheckpoint(Action, frozen=True):
    """The weights are just what whole versions have made of them: keep them, and where the run is."""

    position: Position


class NameBest(Action, frozen=True):
    """The last checkpoint is the best so far."""

    steps: int


class DropNode(Action, frozen=True):
    node: int
    why: str


class EndRun(Action, frozen=True):
    """Training is over; `failure` says in one line why it failed, if it did. `hurries`: its time was limited."""

    why: str
    failure: str = ""
    details: str = ""
    hurries: bool = False


ACTIONS: tuple[type[Action], ...] = tuple(Action.__subclasses__())
EVENTS: tuple[type[Event], ...] = tuple(Event.__subclasses__())
