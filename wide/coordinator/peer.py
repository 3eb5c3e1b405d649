"""One connection as the coordinator sees it, from the first byte to the last. Knows no decisions."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from wide.codec.layout import Flat
from wide.telemetry.totals import NodeTotals
from wide.transport.connection import Connection


@dataclass(slots=True, eq=False)
class Peer:
    """Who is at the other end, and how far we are with each other."""

    connection: Connection
    address: str
    connected_at: float
    node: int = 0  # 0: has not said hello yet
    name: str = ""
    is_evaluator: bool = False
    is_working: bool = False  # has built its model and is a member of the pool
    has_data: bool = False  # it has the data set itself: sample ids are enough
    version: int = -1  # of the weights it was sent last
    sizes: list[int] = field(default_factory=list)  # the samples in each batch of its lease
    wants_write: bool = False
    totals: NodeTotals | None = None
    incoming: deque[Flat] = field(default_factory=deque)  # updates being received, or waiting to be merged

    def __repr__(self) -> str:
        return f"<Peer {self.node} {self.name!r} at {self.address}>"

    def count_bytes(self) -> None:
        """A node's bytes are ours seen from the other end."""
        if self.totals is not None:
            self.totals.bytes_sent = self.totals.raw_bytes = self.connection.bytes_received
            self.totals.bytes_received = self.connection.bytes_sent
