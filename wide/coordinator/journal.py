"""What happens in a run, for people: who came and went, what was refused and chosen, series of numbers, the picture.
Knows run.db's tables; nothing here is needed to train on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from wide.telemetry.clock import Clock
from wide.telemetry.log import log
from wide.telemetry.snapshot import Event, Snapshot, encoded
from wide.telemetry.totals import NodeTotals

SERIES_S, SERIES_NODES = 1.0, 64  # a point a second; of more nodes than this, so much less often
REMEMBERED = 40  # events, for whoever looks
SAME_S = 10.0  # what happens again within this is one event
HARMLESS = ("late", "duplicate")  # two computed the same, and one was first: nobody did anything wrong
MACHINE = "INSERT OR IGNORE INTO machines VALUES (?, ?, ?, ?, ?, NULL)"
COUNTS = ("batches", "samples", "bytes_sent", "bytes_received", "raw_bytes", "rss_bytes")
SERIES = (*COUNTS, "compute_s", "fetch_s", "codec_s", "network_s", "travel_s")


class Db(Protocol):
    """What is needed of a database (store/rundb.py)."""

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...


class Points(Protocol):
    """Where else numbers go (store/tensorboard.py)."""

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None: ...


class Journal:
    """Rows are handed to the database's thread at once; series once a second."""

    def __init__(self, db: Db, clock: Clock, points: Points | None = None) -> None:
        self._db, self._clock, self._points = db, clock, points
        self._logged_at = 0.0
        self.events: deque[Event] = deque(maxlen=REMEMBERED)
        self._told: dict[tuple[str, int | None, str], float] = {}  # what may happen often, and when it last did
        self._left: list[int] = []  # since the last point of the series
        self._series_at = self._losses_at = 0.0
        self._losses: list[float] = []  # since then

    def tell(self, kind: str, node: int | None, words: str) -> None:
        event = Event(self._clock.wall(), kind, node, words)
        self.events.append(event)
        self._db.insert("events", [event])

    def enrolled(self, machine: str, name: str, address: str, invite: str) -> None:
        self._db.write(MACHINE, [(machine, name, address, invite, self._clock.wall())])

    def node_joined(self, node: int, name: str, host: str, machine: str = "", address: str = "") -> None:
        at = self._clock.wall()
        self._db.insert("nodes", [(node, name, host, at, None, None)])
        if machine:
            self._db.insert("visits", [(node, machine, address, at)])
            self._db.write(MACHINE, [(machine, name, address, "", at)])  # if a crash has lost it

    def node_left(self, node: int, why: str) -> None:
        rows = [(self._clock.wall(), why, node)]
        self._db.write("UPDATE nodes SET left_at=?, why=? WHERE node=? AND left_at IS NULL", rows)
        self._left.append(node)

    def rejected(self, node: int | None, reason: str, detail: str) -> None:
        at = self._clock.wall()
        self._db.insert("rejects", [(at, node, reason, detail)])
        log.debug("rejected %s from node %s: %s", reason, node, detail)
        key = ("rejected", node, reason)
        if reason not in HARMLESS and at - self._told.get(key, -SAME_S) >= SAME_S:
            self._told = {k: when for k, when in self._told.items() if at - when < SAME_S}
            self._told[key] = at
            self.tell("rejected", node, f"{reason}: {detail}")

    def chose(self, node: int, role: str, codec: str, reason: str) -> None:
        self._db.insert("choices", [(self._clock.wall(), node, role, codec, reason)])
        if role == "strategy":
            self.tell("planned", None, f"{codec}: {reason}")
        elif codec != "raw":
            self.tell("codec", node, f"{codec} for its {role}: {reason}")

    def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        at = self._clock.wall()
        self._db.insert("samples", [(at, None, f"evaluate/{name}", value) for name, value in metrics.items()])
        if self._points is not None:
            self._points.write(step, at, {f"evaluate/{name}": value for name, value in metrics.items()})

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """By the job's loss: one point a second."""
        at = self._clock.wall()
        if self._points is not None and at - self._logged_at >= 1.0:
            self._logged_at = at
            self._points.write(step, at, {f"train/{name}": value for name, value in metrics.items()})

    def losses(self, values: Sequence[float], steps: int, force: bool = False) -> None:
        """Of steps that were closed, up to that one. Where they are quicker than that, one point a second is their
        mean.
        """
        if self._points is None:
            return
        self._losses.extend(values)
        at = self._clock.wall()
        if self._losses and (force or at - self._losses_at >= SERIES_S):
            self._points.write(steps, at, {"loss": sum(self._losses) / len(self._losses)})
            self._losses_at = at
            self._losses.clear()

    def series(self, nodes: Sequence[NodeTotals], now: float, force: bool = False, **pools_own: float) -> bool:
        """One point of each node's series a second, and of the pool's own; of who has left since the last one, a last
        point. Was it time for that?
        """
        if not force and now - self._series_at < SERIES_S * max(1.0, len(nodes) / SERIES_NODES):
            return False
        self._series_at = now
        at = self._clock.wall()
        self._db.insert("samples", [(at, n.node, metric, getattr(n, metric)) for n in nodes for metric in SERIES])
        self._db.insert("samples", [(at, None, metric, value) for metric, value in pools_own.items()])
        self._left.clear()
        return True

    def show(self, run: Snapshot) -> None:
        """Where others see it: another process can read nothing but run.db."""
        self._db.write("INSERT OR REPLACE INTO live VALUES (0, ?, ?)", [(self._clock.wall(), encoded(run).decode())])
        if self._points is not None and run.step:
            numbers = {"pool/batches_per_s": run.batches_per_s, "pool/nodes": float(len(run.nodes))}
            self._points.write(run.step, self._clock.wall(), numbers)

    @property
    def left_lately(self) -> list[int]:
        return self._left
