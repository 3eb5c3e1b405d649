"""What a run leaves behind: ledger, steps, nodes, series, and the totals of the final result. Knows run.db's tables."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wide.job.schedule import Step
from wide.store.rundb import RunDb
from wide.strategy.tree import Block
from wide.telemetry.log import log
from wide.telemetry.progress import Progress

FLUSH_S = 0.25
SERIES_S = 1.0


@dataclass(slots=True)
class NodeTotals:
    """One node's part in a run; the JSON result carries these fields."""

    node: int
    name: str
    pid: int
    batches: int = 0
    samples: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    raw_bytes: int = 0
    compute_s: float = 0.0
    codec_s: float = 0.0
    network_s: float = 0.0
    compression_ratio: float = 1.0
    rss_bytes: int = 0


class Record:
    """Rows are gathered in memory and handed to the database's thread a few times a second."""

    def __init__(self, db: RunDb, progress: Progress) -> None:
        self.db = db
        self.progress = progress
        self.nodes: dict[int, NodeTotals] = {}
        self.losses: list[float] = []
        self.batches = 0
        self.samples = 0
        self.metrics: dict[str, float] = {}
        self.started_at = 0.0
        self.ended_at = 0.0
        self._step_losses: dict[int, tuple[Sequence[float], Sequence[int]]] = {}  # by first batch
        self._step_began_at = 0.0
        self._ledger: list[tuple[Any, ...]] = []
        self._steps: list[tuple[Any, ...]] = []
        self._flushed_at = 0.0
        self._series_at = 0.0
        self._told_at = 0.0

    @property
    def seconds(self) -> float:
        """From the first lease granted to the last update merged."""
        return self.ended_at - self.started_at

    def started(self) -> None:
        self.started_at = self.ended_at = self._step_began_at = self.progress.started_at = time.monotonic()

    def node_joined(self, node: int, name: str, host: str, pid: int) -> NodeTotals:
        totals = self.nodes[node] = NodeTotals(node, name, pid)
        self.db.insert("nodes", [(node, name, host, time.time(), None, None)])
        self.progress.nodes += 1
        return totals

    def node_left(self, node: int, why: str) -> None:
        self.db.write("UPDATE nodes SET left_at=?, why=? WHERE node=? AND left_at IS NULL", [(time.time(), why, node)])
        self.progress.nodes -= 1

    def merged(self, step: int, block: Block, node: int, sizes: Sequence[int], losses: Sequence[float]) -> None:
        samples = sum(sizes)
        loss = sum(map(float.__mul__, losses, map(float, sizes))) / samples
        self._step_losses[block.first] = (losses, sizes)
        row = (step, block.first, block.end - 1, node, samples, loss, step + 1, time.time())
        self._ledger.append(row)
        totals = self.nodes[node]
        totals.batches += block.size
        totals.samples += samples

    def step_closed(self, step: Step) -> None:
        """The step's loss is added up in the order of its batches, so that it too is the same from any pool."""
        now = time.monotonic()
        pairs = [pair for first in sorted(self._step_losses) for pair in zip(*self._step_losses[first], strict=True)]
        loss = sum(loss * n for loss, n in pairs) / step.samples
        self._step_losses.clear()
        self.losses.append(loss)
        self.batches += step.batches
        self.samples += step.samples
        row = (step.number, step.epoch, step.samples, loss, now - self._step_began_at, time.time())
        self._steps.append(row)
        self.ended_at = self._step_began_at = now
        progress = self.progress
        progress.step, progress.epoch, progress.loss, progress.batches = step.number + 1, step.epoch, loss, self.batches

    def rejected(self, node: int | None, reason: str, detail: str) -> None:
        self.db.insert("rejects", [(time.time(), node, reason, detail)])
        log.debug("rejected %s from node %s: %s", reason, node, detail)

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
        self.db.insert("ledger", self._ledger)
        self.db.insert("steps", self._steps)
        self._ledger, self._steps = [], []
        if force or now - self._series_at >= SERIES_S:
            self._series_at = now
            at = time.time()
            names = ("batches", "bytes_sent", "bytes_received", "compute_s", "network_s", "rss_bytes")
            self.db.insert("samples", [(at, n.node, m, getattr(n, m)) for n in self.nodes.values() for m in names])
