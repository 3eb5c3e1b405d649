"""Runs as a pool would have left them, of any length, written through the real record and run.db on a clock of their
own: for benchmarks and tests of what reads them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

from wide.coordinator.events import MergeUpdate
from wide.coordinator.picture import Shell, picture
from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule
from wide.store.rundb import RunDb
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.tree import Block
from wide.telemetry.clock import Clock
from wide.telemetry.journey import Journey
from wide.telemetry.lately import Lately
from wide.telemetry.snapshot import NodeView
from wide.telemetry.totals import Traffic, totals_of

BATCH_SIZE = 32
CHECKPOINT_S = 30.0
BEGAN_AT = 1_794_960_000.0


class Staged:
    """A run of `nodes` nodes that merge `leases_per_s` leases of one batch each, `batches_per_step` in a step."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 10,
        leases_per_s: float = 1000.0,
        batches_per_step: int = 10,
        samples: int = 1000,
        name: Callable[[int], str] = lambda node: f"node-{node}",
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.now, self._lease_s = folder, 0.0, 1 / leases_per_s
        self._chance = random.Random(0)
        self._schedule = Schedule(samples, BATCH_SIZE, batches_per_step, 0)
        self._db = RunDb(folder / "run.db")
        self._record = Record(self._db, self._schedule, Clock(lambda: self.now, lambda: BEGAN_AT + self.now))
        self._strategy, self._lately = STRATEGIES["sync"], Lately()
        self._pool = Pool(self._schedule, None, None)
        self._traffic = {node: Traffic(rss_bytes=200_000_000 + node) for node in range(1, nodes + 1)}
        for node in self._traffic:
            self._record.node_joined(node, name(node), f"host-{node % 4}", 1000 + node)
            self._record.journal.tell("joined", node, name(node))
        self._record.started(0.0)
        self._step = self._lease = 0
        self._safe: list[int] = []

    def run(self, leases: int) -> None:
        """So many more."""
        end, looked_at, saved_at = self._lease + leases, self.now, self.now
        while self._lease < end:
            self._make_step()
            if self.now - looked_at >= 1.0:
                looked_at = self.now
                self.look()
            if self.now - saved_at >= CHECKPOINT_S:  # of which the last three are kept
                saved_at = self.now
                self._safe = [*self._safe, self._step][-3:]
                self._db.keep_from(self._safe[0])
                self._db.settle(60.0)

    def look(self) -> None:
        record = self._record
        record.flush(force=True)
        totals = [totals_of(node, record.parts[node], traffic) for node, traffic in self._traffic.items()]
        if record.journal.series(totals, self.now, loop_max_ms=1.0):
            views = [NodeView(one, None, False, 1, f"host-{one.node % 4}") for one in totals]
            record.journal.show(picture(self._pool, record, views, self.now, Shell("staged"), self._lately))

    def close(self, state: str = "done", **more: object) -> None:
        self.look()
        for node in self._traffic:
            self._record.journal.node_left(node, "the run is over")
        self._record.evaluated(self._record.epoch, self._step, {"accuracy": 0.5, "nothing": math.nan})
        self._record.flush(force=True)
        self._db.close()
        session = {"state": state, "began_at": BEGAN_AT, "ended_at": BEGAN_AT + self.now, "command": ["wide", "run"]}
        session |= {"options": {"nodes": len(self._traffic), "strategy": "sync"}, "why": "all steps done", **more}
        (self.folder / "run.json").write_text(json.dumps({"schema": "wide.run/1", "sessions": [session]}))

    def _make_step(self) -> None:
        step, first = self._schedule.step(self._step), self._schedule.position(self._step)
        for batch in range(step.batches):
            self._lease += 1
            self.now += self._lease_s
            node = self._chance.randrange(1, len(self._traffic) + 1)
            block = Block(first + batch, first + batch + 1)
            compute_s = self._lease_s * len(self._traffic) * self._chance.uniform(0.4, 0.8)
            granted_at = self.now - 1.3 * compute_s
            merge = MergeUpdate(node, self._lease, block, self._step + 1, granted_at=granted_at)
            journey = Journey(compute_s, 0.05 * compute_s, self.now - 0.1 * compute_s, self.now)
            traffic = self._traffic[node]
            traffic.compute_s += compute_s
            traffic.bytes_sent += 1680
            loss = 2.3 * 0.9999**self._step + self._chance.uniform(0.0, 0.2)
            sizes = self._schedule.sizes(step, batch, batch + 1)
            self._record.merged(merge, self._strategy, sizes, [loss], journey)
        self._record.step_closed(step, self._strategy)
        self._step += 1
