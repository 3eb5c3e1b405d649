"""What the exchange tells whoever coordinates: one struct for each thing that may happen to a connection. Past tense.

Numbers in them are finite and in range, text is printable: they were checked where they came in.
"""

from __future__ import annotations

import msgspec

from wide.codec.digest import Later
from wide.codec.layout import Flat
from wide.exchange.peer import Peer
from wide.telemetry.journey import Journey


class Happening(msgspec.Struct, frozen=True, gc=False):
    """Something that happened."""


class Enrolled(Happening, frozen=True):
    """A machine has come by an invite, and has a key of its own from now on."""

    machine: str
    name: str
    address: str
    invite: str


class Joined(Happening, frozen=True):
    """A node was let in, and builds its model now. `machine` is the one that it was enrolled as, if any."""

    node: int
    name: str
    host: str
    pid: int
    machine: str = ""
    address: str = ""
    build: str = ""  # what it computes with


class Ready(Happening, frozen=True):
    """A node can be given work."""

    node: int
    has_data: bool
    machine: str
    cores: int
    data_problem: str = ""  # why it has none
    known_as: str = ""  # the machine as which it was let in


class Left(Happening, frozen=True):
    """A node's connection has ended; `was_ready`: it could have been given work; `died`: nobody had ended it."""

    node: int
    name: str
    why: str
    was_ready: bool
    died: bool


class Silent(Happening, frozen=True):
    """Nothing was heard of a node for several heartbeats, but its connection has not ended."""

    node: int
    name: str


class Heard(Happening, frozen=True):
    """A silent node is back."""

    node: int
    name: str


class Updated(Happening, frozen=True):
    """A node's update for a lease is here, all of it. `sizes` are the samples in each batch of the lease, and empty if
    it has none of that number. `problem` is empty if the numbers are sound.
    """

    node: int
    lease: int
    flat: Flat
    sizes: list[int]
    losses: list[float]
    journey: Journey
    problem: str = ""
    norm: float = 0.0  # of all that will be added up
    digest: int | Later = 0  # codec/digest.py


class Failed(Happening, frozen=True):
    """A node could not compute a batch of a lease (-1: before any batch)."""

    node: int
    lease: int
    batch: int
    problem: str
    details: str


class ParametersMoved(Happening, frozen=True):
    """A node has noticed that the loss changes parameters, or unfreezes them; these were not known to move."""

    names: list[str]


class JobRefused(Happening, frozen=True):
    """A node has tried the job, and says that it cannot be trained by anybody."""

    problem: str
    details: str


class Owed(Happening, frozen=True):
    """What a leaving node's codec had left out of its updates."""

    flat: Flat


class Rejected(Happening, frozen=True):
    """Something was refused: by this countable reason. `node` is None where it was nobody's."""

    node: int | None
    reason: str
    detail: str


class Dismissed(Happening, frozen=True):
    """A peer was sent away for this reason, which may be why all of them will be gone."""

    why: str


class Chose(Happening, frozen=True):
    """A codec for what one link carries, and why."""

    node: int
    role: str
    codec: str
    reason: str


class PlanAsked(Happening, frozen=True):
    """Somebody with the token wants to know how this pool should train."""

    peer: Peer


class EvaluatorReady(Happening, frozen=True):
    """The process that runs the user's evaluate() is there."""


class EvaluatorLost(Happening, frozen=True):
    """It ended."""

    why: str


class EvaluationFailed(Happening, frozen=True):
    """The user's evaluate() raised."""

    problem: str
    details: str


class Evaluated(Happening, frozen=True):
    """The user's evaluate() says this about the weights after that step."""

    epoch: int
    step: int
    metrics: dict[str, float]


HAPPENINGS: tuple[type[Happening], ...] = tuple(Happening.__subclasses__())
