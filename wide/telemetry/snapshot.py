"""One frozen picture of a run: where it is, who is in it, how each link is used, what was decided and why.

Built by whoever trains, a few times a second, and left in a `Window`; once a second it is written to run.db, too. Every
view reads it in one of these places, without a lock: terminal, notebook, plan, report, dashboard. Nothing looks into
the coordinator itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from wide.telemetry.totals import NodeTotals


class LinkView(NamedTuple):
    """A node's connection, as measured, and what is used on it; `travel_s`, for each codec that may be used: how long
    an update, and new weights, would be on their way. `lossy_s`: the same, for those that --compress does not allow.
    """

    up_bytes_per_s: float
    down_bytes_per_s: float
    delay_s: float
    codecs: dict[str, str]  # by role
    travel_s: dict[str, tuple[float, float]]
    computes_batches_per_s: float  # while it does nothing else; 0: not measured
    updates: int
    lossy_s: dict[str, tuple[float, float]] | None = None
    is_here: bool = False  # it runs beside the coordinator: there is no network between


class Recent(NamedTuple):
    """What a node did lately, and in which parts of its time. Fetching data is a part of computing."""

    batches_per_s: float = 0.0
    compute: float = 0.0
    fetch: float = 0.0
    codec: float = 0.0
    travel: float = 0.0
    wait: float = 0.0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


class NodeView(NamedTuple):
    """One member of the pool."""

    totals: NodeTotals  # a copy
    link: LinkView | None
    is_silent: bool
    leases: int
    host: str = ""
    machine: str = ""  # the same for all nodes of one; "": not known
    cores: int = 0  # that the machine has for nodes
    recent: Recent = Recent()
    build: str = ""  # torch, device, threads, instruction set, by its own words
    staleness: int = 0  # steps that the weights had made since it was given them, when its last update counted

    @property
    def state(self) -> str:
        return "silent" if self.is_silent else "computes" if self.leases else "waits"


class Event(NamedTuple):
    """Something worth telling: when by the wall's clock, of what kind, about which node if any, and what."""

    at: float
    kind: str
    node: int | None
    words: str


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
    loss: float | None = None
    losses: tuple[float, ...] = ()  # of the whole run, as few points as a small picture needs
    elapsed_s: float = 0.0
    before: tuple[int, int] = (0, 0)  # steps and batches that were done before this process
    started_at: float | None = None  # of the first lease
    left_s: float | None = None
    nodes: tuple[NodeView, ...] = ()
    waits_for: str = ""
    busy_s_per_update: float = 0.0  # of the coordinator's loop
    metrics: dict[str, float | None] = field(default_factory=dict)  # None: not a finite number
    events: tuple[Event, ...] = ()  # the last ones
    job: str = ""
    is_exact: bool = True
    batches_per_step: int = 1
    batches_per_s: float = 0.0  # lately, as the next ones
    steps_per_s: float = 0.0
    busy: float = 0.0  # part of its time that the coordinator's loop had something to do
    evaluating: float = 0.0  # part of the time that everybody waited for evaluate()
    evaluation_s: float = 0.0  # that the longest took
    checkpoint_s: float = 0.0  # that the last one took to write
    rows_waiting: int = 0  # for run.db
    why_slow: tuple[str, ...] = ()  # what is in the way, the costliest first (strategy/why.py)
    verdict: str = ""  # the same in one line, or that all is well
    possible: float = 0.0  # batches in a second that its nodes could compute together; 0: not measured
    used: float | None = None  # which part of that it did, when that was last looked at
    is_paused: bool = False  # by its owner: nothing is leased


class Window:
    """Where the newest snapshot is to be seen; and, before training begins, what is being done, and since when."""

    def __init__(self) -> None:
        self.latest = Snapshot(0.0)
        self.phase = ("", 0.0)

    def enter(self, phase: str) -> None:
        self.phase = (phase, time.monotonic())


def encoded(snapshot: Snapshot) -> bytes:
    return msgspec.json.encode(snapshot)


def decoded(text: bytes | str) -> Snapshot:
    """Raises msgspec.ValidationError, or DecodeError, if it is none."""
    return msgspec.json.decode(text, type=Snapshot)


class Bins:
    """A long series in few points, each the mean of those it stands for. Adding one costs the same, however many."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 1  # how many values a bin has
        self._full: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        self._sum += value
        self._count += 1
        if self._count == self._size:
            self._full.append(self._sum / self._size)
            self._sum, self._count = 0.0, 0
            if len(self._full) == 2 * self._most:
                self._full = [(a + b) / 2 for a, b in zip(self._full[::2], self._full[1::2], strict=True)]
                self._size *= 2

    @property
    def means(self) -> tuple[float, ...]:
        return (*self._full, *([self._sum / self._count] if self._count else []))
