"""One connection as the coordinator sees it, from the first byte to the last: who it is, and its parts. Each part is
written only by the class that owns it. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from wide.codec.choose import ROLES, Role
from wide.codec.layout import Flat
from wide.codec.lossless import Buffers
from wide.codec.speeds import Cpu
from wide.exchange.patience import Patience
from wide.exchange.probe import Probing
from wide.telemetry.link import Link
from wide.telemetry.totals import Traffic
from wide.transport.connection import Connection
from wide.wire.messages import Message, Update

NEVER, OLD = -1, -2  # in place of a version: it was sent none yet; or one that nobody compares anything with


class Sent(NamedTuple):
    """Work that it has: the samples in each batch, the codec that was asked for, where its update will lie, if it is
    not sent, and the version that it reads from our memory until it answers.
    """

    sizes: list[int]
    codec: str
    room: Flat | None = None
    reads: int = NEVER


@dataclass(slots=True)
class Outgoing:
    """Work on its way out. Written by delivery.py."""

    version: int = NEVER  # of the weights it was sent last, or has built
    is_new: bool = True  # it was given no work yet, and so knows of no version
    sending: set[int] = field(default_factory=set)  # versions that may still be on their way to it, as they are
    keeps_versions: bool = False  # it holds the last version apart, so that differences can be added to it
    pending: deque[tuple[Message, Future[Buffers]]] = field(default_factory=deque)  # to be sent, in this order
    leases: dict[int, Sent] = field(default_factory=dict)
    answered: int = NEVER  # the lease of its last update, which may come once more
    refused: int = 0  # the lease whose update, its last one, did not count; it has not been told yet
    ahead: int = 0  # the lease that it has, but may not begin before it is sent the weights of
    awaits: int = NEVER  # this version

    @property
    def is_at_work(self) -> bool:
        return len(self.leases) > (self.ahead in self.leases)


@dataclass(slots=True)
class Arriving:
    """An update on its way in: since when, and the bytes that had come by then; in parts, how many began, and came."""

    update: Update
    since: float
    idle_before_s: float  # of the coordinator's loop
    nbytes_before: int
    announced: int = 0
    parts: int = 0
    nbytes: int = 0  # of those parts
    flat: Flat | None = None


@dataclass(slots=True)
class Incoming:
    """Updates on their way in. Written by intake.py."""

    arriving: deque[Arriving] = field(default_factory=deque)  # in their order
    payloads: deque[Flat | bytearray] = field(default_factory=deque)  # as they came: flat ones, and parts
    saved_nbytes: int = 0  # by encoding updates
    updates: int = 0
    computed: tuple[float, float] = (0.0, 0.0)  # batches, in seconds; lately

    @property
    def batches_per_s(self) -> float:
        """While it computes and does nothing else; lately."""
        batches, seconds = self.computed
        return batches / seconds if seconds else 0.0


@dataclass(slots=True)
class LinkState:
    """How wide the way is, and what goes over it in which form. Written by link_codecs.py."""

    up: Link | None = None  # from it to us, and
    down: Link | None = None  # back; unknown until it has been probed
    cpu: Cpu = field(default_factory=Cpu)  # how quickly it encodes its updates
    codecs: dict[Role, str] = field(default_factory=lambda: dict.fromkeys(ROLES, "raw"))
    chosen: set[Role] = field(default_factory=set)  # for which something was chosen
    decided_at: float = float("-inf")
    wants_speeds: tuple[str, ...] = ()  # codecs that it should try on its next update


@dataclass(slots=True, eq=False)
class Peer:
    """Who is at the other end. Written by reception.py; `wants_write` by the switchboard."""

    connection: Connection
    address: str
    connected_at: float
    host: str = ""  # where it called from
    is_own: bool = False  # both ends are on this machine, as far as addresses tell
    nonces: tuple[bytes, bytes] | None = None  # once it has knocked
    machine_id: str = ""  # as which it was let in; empty: by the pool's token
    node: int = 0  # 0: has not said hello yet
    name: str = ""
    is_evaluator: bool = False
    has_asked: bool = False  # for a plan, or to see the code, and is no member
    echoes: int = 0  # that it was given as a visitor
    is_on_this_machine: bool = False
    is_checker: bool = False  # it was asked to try the job before it is ready
    is_alike: bool = False  # its numbers are rounded as ours are
    machine: str = ""  # by its own words
    cores: int = 0
    is_ready: bool = False  # has built its model and can be given work
    has_data: bool = False  # it has the data set itself: sample ids are enough
    shares_memory: bool = False  # weights and updates need not be sent
    probing: Probing | None = None
    wants_write: bool = False
    traffic: Traffic = field(default_factory=Traffic)
    bytes_before: tuple[int, int, int] = (0, 0, 0)  # sent, received and raw, by connections before this one
    outgoing: Outgoing = field(default_factory=Outgoing)
    incoming: Incoming = field(default_factory=Incoming)
    link: LinkState = field(default_factory=LinkState)
    patience: Patience = field(default_factory=Patience)

    def __repr__(self) -> str:
        return f"<Peer {self.node} {self.name!r} at {self.address}>"

    @property
    def is_closed(self) -> bool:
        return self.connection.stream.is_closed

    def count_bytes(self) -> None:
        """A node's bytes are ours seen from the other end."""
        traffic, (sent, received, raw) = self.traffic, self.bytes_before
        traffic.bytes_sent = sent + self.connection.bytes_received
        traffic.bytes_received = received + self.connection.bytes_sent
        traffic.raw_bytes = raw + self.connection.bytes_received + self.incoming.saved_nbytes
