"""What a run leaves behind: ledger, steps, nodes, series, and the counts of the final result. Knows run.db's tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from wide.coordinator.events import MergeUpdate, Position
from wide.errors import TrainingFailed
from wide.job.schedule import Schedule, Step
from wide.strategy.description import Strategy
from wide.telemetry.clock import Clock
from wide.telemetry.divergence import Divergence
from wide.telemetry.log import log
from wide.telemetry.totals import NodeTotals, Part

FLUSH_S = 0.25
SERIES_S, SERIES_NODES = 1.0, 64  # a point a second; of more nodes than this, so much less often
SETTLE_S = 30.0
MACHINE = "INSERT OR IGNORE INTO machines VALUES (?, ?, ?, ?, ?, NULL)"
SERIES = ("batches", "bytes_sent", "bytes_received", "compute_s", "codec_s", "network_s", "rss_bytes")


class Db(Protocol):
    """What the record needs of a database (store/rundb.py)."""

    def insert(self, table: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def write(self, statement: str, rows: Sequence[tuple[Any, ...]]) -> None: ...
    def read(self, query: str, *values: Any) -> list[tuple[Any, ...]]: ...
    def settle(self, timeout_s: float) -> bool: ...


class Record:
    """Rows are gathered in memory and handed to the database's thread a few times a second."""

    def __init__(self, db: Db, schedule: Schedule, clock: Clock) -> None:
        self.db, self.schedule, self._clock = db, schedule, clock
        self.divergence = Divergence()
        self.parts: dict[int, Part] = {}  # by node
        self.losses: list[float] = []  # of each step
        self.batches = self.samples = 0
        self.metrics: dict[str, float] = {}
        self.started_at: float | None = None  # with the first lease
        self.before = (0, 0)  # steps and batches that were done before this process
        self.last_node = 0  # the highest number that was given to one
        self._ended_at = self._step_began_at = 0.0
        self._spent_s = 0.0  # by processes before this one
        self._merged: list[tuple[MergeUpdate, Strategy, Sequence[int], Sequence[float], float]] = []
        self._closed: list[tuple[Step, Strategy, float, float]] = []
        self._weighted_losses: dict[int, dict[int, list[float]]] = {}  # by step, by a block's first batch
        self._evaluation_problem = ""
        self._left: list[int] = []  # since the last point of the series
        self._flushed_at = self._series_at = self._told_at = 0.0

    @property
    def seconds(self) -> float:
        """From the first lease granted to the last update merged."""
        return self._spent_s + (self._ended_at - self.started_at if self.started_at is not None else 0.0)

    @property
    def epoch(self) -> int:
        return self.schedule.step(max(0, len(self.losses) - 1)).epoch

    def started(self, now: float) -> None:
        self.started_at = self._ended_at = self._step_began_at = now

    def go_on_from(self, position: Position, state: Mapping[str, Any], parts: Mapping[int, Part]) -> None:
        """What was written later is dropped, and will be computed again."""
        for statement, value in (
            ("DELETE FROM ledger WHERE version > ?", position.version),
            ("DELETE FROM steps WHERE step >= ?", position.steps),
            ("DELETE FROM evaluations WHERE step > ?", position.steps),
            ("UPDATE nodes SET left_at=?, why='the coordinator ended' WHERE left_at IS NULL", self._clock.wall()),
        ):
            self.db.write(statement, [(value,)])
        if not self.db.settle(SETTLE_S):
            raise TrainingFailed("run.db cannot be written")
        self.batches, self.samples = state.get("batches", 0), state.get("samples", 0)
        self.parts = dict(parts)
        self.last_node = self.db.read("SELECT max(node) FROM nodes")[0][0] or 0
        self._spent_s = state.get("seconds", position.seconds)
        self.before = position.steps, self.batches
        self.losses = [loss for (loss,) in self.db.read("SELECT loss FROM steps ORDER BY step")]
        for loss in self.losses[:1]:
            self.divergence.observe(loss)  # where it began; what made it diverge since then may have been mended
        query = "SELECT step, first_batch, samples, loss FROM ledger WHERE step >= ?"
        for step, first, samples, loss in self.db.read(query, position.steps):
            self._weighted_losses.setdefault(step, {})[first - self.schedule.step(step).first] = [loss * samples]
        query = "SELECT metric, value FROM evaluations WHERE step = (SELECT max(step) FROM evaluations)"
        self.metrics = {name: math.nan if value is None else value for name, value in self.db.read(query)}

    def is_evaluated(self, step: int) -> bool:
        return bool(self.db.read("SELECT 1 FROM evaluations WHERE step = ?", step))

    def enrolled(self, machine: str, name: str, address: str, invite: str) -> None:
        self.db.write(MACHINE, [(machine, name, address, invite, self._clock.wall())])

    def node_joined(self, node: int, name: str, host: str, pid: int, machine: str = "", address: str = "") -> None:
        self.parts.setdefault(node, Part(name, pid))
        self.last_node = max(self.last_node, node)
        self.db.insert("nodes", [(node, name, host, self._clock.wall(), None, None)])
        if machine:
            self.db.insert("visits", [(node, machine, address, self._clock.wall())])
            self.db.write(MACHINE, [(machine, name, address, "", self._clock.wall())])  # if a crash has lost it

    def node_left(self, node: int, why: str) -> None:
        rows = [(self._clock.wall(), why, node)]
        self.db.write("UPDATE nodes SET left_at=?, why=? WHERE node=? AND left_at IS NULL", rows)
        self._left.append(node)

    def merged(self, merge: MergeUpdate, strategy: Strategy, sizes: Sequence[int], losses: Sequence[float]) -> None:
        """On the way of every gradient: only remember it."""
        self._merged.append((merge, strategy, sizes, losses, self._clock.wall()))
        if not strategy.needs_whole_steps:
            self._ended_at = self._clock.now()

    def step_closed(self, step: Step, strategy: Strategy) -> None:
        now = self._clock.now()
        self._closed.append((step, strategy, now - self._step_began_at, self._clock.wall()))
        self._ended_at = self._step_began_at = now

    def _work_up(self) -> None:
        """What was remembered, as rows and counts. A step's loss is added up in the order of its batches, so that it
        is the same from any pool. Where a version needs whole steps, batches count when their step does.
        """
        merged, self._merged = self._merged, []
        closed, self._closed = self._closed, []
        rows: list[tuple[int | float, ...]] = []
        for merge, strategy, sizes, losses, at in merged:
            weighted = [loss * n for loss, n in zip(losses, sizes, strict=True)]
            done = 0
            for step, first, end in self.schedule.stretches(*merge.block):
                mine = slice(done, done + end - first)
                done += end - first
                samples = sum(sizes[mine])
                self._weighted_losses.setdefault(step.number, {})[first] = weighted[mine]
                start = step.first if strategy.counts_by_epoch else 0
                loss = sum(weighted[mine]) / samples
                place = (step.number, start + first, start + end - 1)
                rows.append((*place, merge.node, samples, loss, merge.version, at))
            part = self.parts[merge.node]
            part.batches += done
            part.samples += sum(sizes)
            if not strategy.needs_whole_steps:
                self.batches += done
                self.samples += sum(sizes)
        self.db.insert("ledger", rows)
        self.db.insert("steps", [self._close(*item) for item in closed])

    def _close(self, step: Step, strategy: Strategy, seconds: float, at: float) -> tuple[int | float, ...]:
        by_first = self._weighted_losses.pop(step.number)
        loss = sum(value for first in sorted(by_first) for value in by_first[first]) / step.samples
        self.losses.append(loss)
        self.divergence.observe(loss)
        if strategy.needs_whole_steps:
            self.batches += step.batches
            self.samples += step.samples
        return (step.number, step.epoch, step.samples, loss, seconds, at)

    def rejected(self, node: int | None, reason: str, detail: str) -> None:
        self.db.insert("rejects", [(self._clock.wall(), node, reason, detail)])
        log.debug("rejected %s from node %s: %s", reason, node, detail)

    def chose(self, node: int, role: str, codec: str, reason: str) -> None:
        self.db.insert("choices", [(self._clock.wall(), node, role, codec, reason)])

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        at = self._clock.wall()
        self.db.insert("evaluations", [(at, epoch, step, name, value) for name, value in metrics.items()])
        self.db.insert("samples", [(at, None, f"evaluate/{name}", value) for name, value in metrics.items()])
        self.metrics = metrics
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        level = logging.INFO if at - self._told_at >= SERIES_S else logging.DEBUG  # quick epochs would flood the screen
        self._told_at = at if level == logging.INFO else self._told_at
        log.log(
            level, "epoch %d, step %d: %s", epoch + 1, step, words, extra={"fields": {"step": step, "metrics": metrics}}
        )

    def evaluation_failed(self, problem: str, details: str) -> None:
        """Told once, and whenever it is another one; training goes on."""
        self.rejected(None, "evaluate", problem)
        level = logging.ERROR if problem != self._evaluation_problem else logging.DEBUG
        self._evaluation_problem = problem
        log.log(level, "%s; training goes on", problem, extra={"fields": {"details": details}})

    def flush(self, force: bool = False) -> None:
        """Called often; does something a few times a second."""
        now = self._clock.now()
        if force or now - self._flushed_at >= FLUSH_S:
            self._flushed_at = now
            self._work_up()

    def series(self, nodes: Sequence[NodeTotals], now: float, force: bool = False, **pools_own: float) -> bool:
        """One point of each node's series a second, and of the pool's own; of who has left since the last one, a last
        point. Was it time for that?
        """
        if not force and now - self._series_at < SERIES_S * max(1.0, len(nodes) / SERIES_NODES):
            return False
        self._series_at = now
        at = self._clock.wall()
        self.db.insert("samples", [(at, n.node, metric, getattr(n, metric)) for n in nodes for metric in SERIES])
        self.db.insert("samples", [(at, None, metric, value) for metric, value in pools_own.items()])
        self._left.clear()
        return True

    @property
    def left_lately(self) -> list[int]:
        return self._left
