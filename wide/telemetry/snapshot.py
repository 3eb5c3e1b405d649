"""One frozen picture of a run: where it is, who is in it, how each link is used, what was decided and why.

Built by whoever trains, a few times a second, and left in a `Window`. Every view reads it there, without a lock:
terminal, plan, result, run.db's series. Nothing looks into the coordinator itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

from wide.telemetry.totals import NodeTotals


class LinkView(NamedTuple):
    """A node's connection, as measured, and what is used on it; `travel_s`, for each codec that may be used: how long
    an update, and new weights, would be on their way.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    delay_s: float
    codecs: dict[str, str]  # by role
    travel_s: dict[str, tuple[float, float]]
    computes_batches_per_s: float  # while it does nothing else; 0: not measured
    updates: int


class NodeView(NamedTuple):
    """One member of the pool."""

    totals: NodeTotals  # a copy
    link: LinkView | None
    is_silent: bool
    leases: int


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    at: float  # of the clock that only goes forward
    strategy: str = ""
    version: int = 0
    steps: int | None = None  # how many there will be, if that is known
    seconds: float | None = None  # the time limit, if there is one
    step: int = 0
    epoch: int = 0
    batches: int = 0
    loss: float = float("nan")
    elapsed_s: float = 0.0
    before: tuple[int, int] = (0, 0)  # steps and batches that were done before this process
    started_at: float | None = None  # of the first lease
    nodes: tuple[NodeView, ...] = ()
    waits_for: str = ""
    busy_s_per_update: float = 0.0  # of the coordinator's loop
    metrics: dict[str, float] = field(default_factory=dict)


class Window:
    """Where the newest snapshot is to be seen; and, before training begins, what is being done, and since when."""

    def __init__(self) -> None:
        self.latest = Snapshot(0.0)
        self.phase = ("", 0.0)

    def enter(self, phase: str) -> None:
        self.phase = (phase, time.monotonic())
