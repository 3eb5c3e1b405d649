"""One connection as the coordinator sees it, from the first byte to the last. Knows no decisions."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from wide.codec.choose import ROLES, Role
from wide.codec.layout import Flat
from wide.codec.lossless import Buffers
from wide.codec.speeds import Cpu
from wide.coordinator.probe import Probing
from wide.telemetry.link import Link
from wide.telemetry.totals import NodeTotals
from wide.transport.connection import Connection
from wide.wire.messages import Message, Update

SPEED_MEMORY = 0.7


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


class Sent(NamedTuple):
    """Work that it has: the samples in each batch, and the codec that was asked for."""

    sizes: list[int]
    codec: str


@dataclass(slots=True, eq=False)
class Peer:
    """Who is at the other end, and how far we are with each other."""

    connection: Connection
    address: str
    connected_at: float
    node: int = 0  # 0: has not said hello yet
    name: str = ""
    is_evaluator: bool = False
    has_asked: bool = False  # for a plan, and is no member
    is_on_this_machine: bool = False
    is_working: bool = False  # has built its model and is a member of the pool
    has_data: bool = False  # it has the data set itself: sample ids are enough
    version: int = -1  # of the weights it was sent last
    sending: set[int] = field(default_factory=set)  # versions that may still be on their way to it, as they are
    keeps_versions: bool = False  # it holds the last version apart, so that differences can be added to it
    up: Link | None = None  # from it to us, and
    down: Link | None = None  # back; unknown until it has been probed
    probing: Probing | None = None
    cpu: Cpu = field(default_factory=Cpu)  # how quickly it encodes its updates
    codecs: dict[Role, str] = field(default_factory=lambda: dict.fromkeys(ROLES, "raw"))
    reasons: dict[Role, str] = field(default_factory=dict)
    decided_at: float = 0.0
    pending: deque[tuple[Message, Future[Buffers]]] = field(default_factory=deque)  # to be sent, in this order
    arriving: deque[Arriving] = field(default_factory=deque)  # updates, in their order
    wants_speeds: tuple[str, ...] = ()  # codecs that it should try on its next update
    refused: int = 0  # the lease whose update, its last one, did not count; it has not been told yet
    saved_nbytes: int = 0  # by encoding updates
    sent: dict[int, Sent] = field(default_factory=dict)  # by lease
    updates: int = 0
    _computed: tuple[float, float] = (0.0, 0.0)  # batches, in seconds
    wants_write: bool = False
    moved_nbytes: int = 0  # both ways, when last looked at, and
    moved_at: float = 0.0  # since when it is so
    heard: tuple[int, float] = (0, 0.0)  # bytes received, and when there were fewer
    said: tuple[int, float] = (0, 0.0)  # and bytes sent
    is_silent: bool = False
    bytes_before: tuple[int, int, int] = (0, 0, 0)  # sent, received and raw, by connections before this one
    totals: NodeTotals | None = None
    incoming: deque[Flat | bytearray] = field(default_factory=deque)  # payloads, as they came: flat ones, and parts

    def __repr__(self) -> str:
        return f"<Peer {self.node} {self.name!r} at {self.address}>"

    def count_update(self, update: Update) -> None:
        """Where its time went, by its own watch."""
        assert self.totals is not None
        self.totals.compute_s += update.compute_s
        self.totals.codec_s += update.codec_s
        self.totals.network_s += update.network_s
        self.totals.rss_bytes = update.rss_bytes
        self.updates += 1
        if update.compute_s > 0 and update.losses:
            batches, seconds = (SPEED_MEMORY * known for known in self._computed)
            self._computed = batches + len(update.losses), seconds + update.compute_s

    @property
    def batches_per_s(self) -> float:
        """While it computes and does nothing else; lately."""
        batches, seconds = self._computed
        return batches / seconds if seconds else 0.0

    def begin_totals(self, totals: NodeTotals) -> None:
        """It may have been here before."""
        self.totals, self.bytes_before = totals, (totals.bytes_sent, totals.bytes_received, totals.raw_bytes)

    def count_bytes(self) -> None:
        """A node's bytes are ours seen from the other end."""
        if self.totals is not None:
            totals, (sent, received, raw) = self.totals, self.bytes_before
            totals.bytes_sent = sent + self.connection.bytes_received
            totals.bytes_received = received + self.connection.bytes_sent
            totals.raw_bytes = raw + self.connection.bytes_received + self.saved_nbytes
            totals.compression_ratio = totals.raw_bytes / max(totals.bytes_sent, 1)
