"""What a run leaves behind: ledger, steps, nodes, series, and the totals of the final result. Knows run.db's tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

from wide.coordinator.events import MergeUpdate, Position
from wide.errors import TrainingFailed
from wide.job.schedule import Schedule, Step
from wide.store.rundb import RunDb
from wide.telemetry.divergence import Divergence
from wide.telemetry.log import log
from wide.telemetry.progress import Progress
from wide.telemetry.totals import NodeTotals

FLUSH_S = 0.25
SERIES_S = 1.0
SETTLE_S = 30.0


class Record:
    """Rows are gathered in memory and handed to the database's thread a few times a second."""

    def __init__(self, db: RunDb, progress: Progress, schedule: Schedule) -> None:
        self.db, self.schedule = db, schedule
        self.divergence = Divergence()
        self.progress = progress
        self.nodes: dict[int, NodeTotals] = {}
        self.losses: list[float] = []
        self.batches = 0
        self.samples = 0
        self.metrics: dict[str, float] = {}
        self.started_at = 0.0
        self.ended_at = 0.0
        self.last_node = 0  # the highest number that was given to one
        self._spent_s = 0.0  # by processes before this one
        self._step_began_at = 0.0
        self._merged: list[tuple[MergeUpdate, bool, Sequence[int], Sequence[float], float]] = []
        self._closed: list[tuple[Step, bool, float, float]] = []
        self._weighted_losses: dict[int, dict[int, list[float]]] = {}  # by step, by a block's first batch
        self._series_of: set[int] = set()  # nodes that are here, or have left since the last point of the series
        self._left: set[int] = set()
        self._flushed_at = 0.0
        self._series_at = 0.0
        self._told_at = 0.0

    @property
    def seconds(self) -> float:
        """From the first lease granted to the last update merged."""
        return self.ended_at - self.started_at if self.started_at else self._spent_s

    def started(self) -> None:
        self.ended_at = self._step_began_at = self.progress.started_at = time.monotonic()
        self.started_at = self.ended_at - self._spent_s

    def resume(self, position: Position, state: Mapping[str, Any]) -> None:
        """Go on from there: what was written later is dropped, and will be computed again."""
        for statement, value in (
            ("DELETE FROM ledger WHERE version > ?", position.version),
            ("DELETE FROM steps WHERE step >= ?", position.steps),
            ("DELETE FROM evaluations WHERE step > ?", position.steps),
            ("UPDATE nodes SET left_at=?, why='the coordinator ended' WHERE left_at IS NULL", time.time()),
        ):
            self.db.write(statement, [(value,)])
        if not self.db.settle(SETTLE_S):
            raise TrainingFailed("run.db cannot be written")
        self.batches, self.samples = state.get("batches", 0), state.get("samples", 0)
        self.nodes = {saved["node"]: NodeTotals(**saved) for saved in state.get("nodes", ())}
        self.last_node = self.db.read("SELECT max(node) FROM nodes")[0][0] or 0
        self._spent_s = position.seconds
        self.progress.before = position.steps, self.batches
        self.losses = [loss for (loss,) in self.db.read("SELECT loss FROM steps ORDER BY step")]
        for loss in self.losses[:1]:
            self.divergence.observe(loss)  # where it began; what made it diverge since then may have been mended
        query = "SELECT step, first_batch, samples, loss FROM ledger WHERE step >= ?"
        for step, first, samples, loss in self.db.read(query, position.steps):
            self._weighted_losses.setdefault(step, {})[first - self.schedule.step(step).first] = [loss * samples]
        query = "SELECT metric, value FROM evaluations WHERE step = (SELECT max(step) FROM evaluations)"
        self.metrics = dict(self.db.read(query))

    def is_evaluated(self, step: int) -> bool:
        return bool(self.db.read("SELECT 1 FROM evaluations WHERE step = ?", step))

    def node_joined(self, node: int, name: str, host: str, pid: int) -> NodeTotals:
        totals = self.nodes.get(node) or NodeTotals(node, name, pid)
        self.nodes[node], self.last_node = totals, max(self.last_node, node)
        self.db.insert("nodes", [(node, name, host, time.time(), None, None)])
        self.progress.nodes += 1
        self._series_of.add(node)
        self._left.discard(node)
        return totals

    def node_left(self, node: int, why: str) -> None:
        self.db.write("UPDATE nodes SET left_at=?, why=? WHERE node=? AND left_at IS NULL", [(time.time(), why, node)])
        self.progress.nodes -= 1
        self._left.add(node)

    def merged(self, merge: MergeUpdate, is_sync: bool, sizes: Sequence[int], losses: Sequence[float]) -> None:
        """On the way of every gradient: only remember it."""
        self._merged.append((merge, is_sync, sizes, losses, time.time()))
        if not is_sync:
            self.ended_at = time.monotonic()

    def step_closed(self, step: Step, is_sync: bool = True) -> None:
        now = time.monotonic()
        self._closed.append((step, is_sync, now - self._step_began_at, time.time()))
        self.ended_at = self._step_began_at = now

    def _work_up(self) -> None:
        """What was remembered, as rows and totals. A step's loss is added up in the order of its batches, so that it
        is the same from any pool.
        """
        merged, self._merged = self._merged, []
        closed, self._closed = self._closed, []
        rows: list[tuple[int | float, ...]] = []
        for merge, is_sync, sizes, losses, at in merged:
            weighted = [loss * n for loss, n in zip(losses, sizes, strict=True)]
            done = 0
            for step, first, end in self.schedule.stretches(*merge.block):
                mine = slice(done, done + end - first)
                done += end - first
                samples = sum(sizes[mine])
                self._weighted_losses.setdefault(step.number, {})[first] = weighted[mine]
                start = 0 if is_sync else step.first  # of its step, or of its epoch
                loss = sum(weighted[mine]) / samples
                place = (step.number, start + first, start + end - 1)
                rows.append((*place, merge.node, samples, loss, merge.version, at))
            self.nodes[merge.node].batches += done
            self.nodes[merge.node].samples += sum(sizes)
            if not is_sync:
                self.batches += done
                self.samples += sum(sizes)
        self.db.insert("ledger", rows)
        self.db.insert("steps", [self._close(*item) for item in closed])

    def _close(self, step: Step, is_sync: bool, seconds: float, at: float) -> tuple[int | float, ...]:
        by_first = self._weighted_losses.pop(step.number)
        loss = sum(value for first in sorted(by_first) for value in by_first[first]) / step.samples
        self.losses.append(loss)
        self.divergence.observe(loss)
        if is_sync:
            self.batches += step.batches
            self.samples += step.samples
        progress = self.progress
        progress.step, progress.epoch, progress.loss, progress.batches = step.number + 1, step.epoch, loss, self.batches
        return (step.number, step.epoch, step.samples, loss, seconds, at)

    def rejected(self, node: int | None, reason: str, detail: str) -> None:
        self.db.insert("rejects", [(time.time(), node, reason, detail)])
        log.debug("rejected %s from node %s: %s", reason, node, detail)

    def chose(self, node: int, role: str, codec: str, reason: str) -> None:
        self.db.insert("choices", [(time.time(), node, role, codec, reason)])

    def evaluated(self, epoch: int, step: int, metrics: dict[str, float]) -> None:
        at = time.time()
        self.db.insert("evaluations", [(at, epoch, step, name, value) for name, value in metrics.items()])
        self.db.insert("samples", [(at, None, f"evaluate/{name}", value) for name, value in metrics.items()])
        self.metrics = self.progress.metrics = metrics
        words = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
        level = logging.INFO if at - self._told_at >= SERIES_S else logging.DEBUG  # quick epochs would flood the screen
        self._told_at = at if level == logging.INFO else self._told_at
        log.log(
            level, "epoch %d, step %d: %s", epoch + 1, step, words, extra={"fields": {"step": step, "metrics": metrics}}
        )

    def flush(self, now: float, force: bool = False) -> None:
        """Called often; does something a few times a second."""
        if not force and now - self._flushed_at < FLUSH_S:
            return
        self._flushed_at = now
        self._work_up()
        if force or now - self._series_at >= SERIES_S:
            self._series_at = now
            at = time.time()
            names = ("batches", "bytes_sent", "bytes_received", "compute_s", "codec_s", "network_s", "rss_bytes")
            told = [totals for node, totals in self.nodes.items() if node in self._series_of]
            self.db.insert("samples", [(at, n.node, m, getattr(n, m)) for n in told for m in names])
            self._series_of -= self._left
            self._left.clear()
