"""Whom a run's samples count for: what was merged, what another has computed too, and what was void."""

from __future__ import annotations

import pytest

from faults.disk import Disk, MemoryDb
from wide.coordinator.events import MergeUpdate, Position
from wide.coordinator.record import Record
from wide.job.schedule import Schedule
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.tree import Block
from wide.telemetry.clock import REAL
from wide.telemetry.journey import Journey
from wide.telemetry.totals import NodeTotals, Part, totals_of

SCHEDULE = Schedule(100, 8, 4, 0)  # 13 batches, 4 steps (4, 4, 4, 1) in an epoch
SYNC = STRATEGIES["sync"]


class Kept:
    """A record, and what it has written."""

    def __init__(self):
        self.disk = Disk()
        self.db = MemoryDb(self.disk)
        self.record = Record(self.db, SCHEDULE, REAL)
        for node in (1, 2):
            self.record.node_joined(node, f"n{node}", "host", 1)

    def merge(self, node, first, end, digest=0, strategy=SYNC):
        step = SCHEDULE.step_at(first)
        start = SCHEDULE.position(step.number)
        sizes = SCHEDULE.sizes(step, first - start, end - start)
        merge = MergeUpdate(node, first, Block(first, end), step.number + 1)
        losses = [0.5] * (end - first)
        self.record.merged(merge, strategy, sizes, losses, Journey(0.0, 0.0, 0.0, 0.0), (), digest)

    def close(self, step):
        self.record.step_closed(SCHEDULE.step(step), SYNC)

    def rows(self, query):
        self.record.flush(force=True)
        self.db.settle()
        return self.disk.read(query)

    @property
    def counts(self):
        self.record.flush(force=True)
        return {node: (part.batches, part.samples, part.verified) for node, part in self.record.parts.items()}


@pytest.fixture
def kept():
    return Kept()


@pytest.mark.parametrize(("strategy", "digest", "written"), [("sync", -7, -7), ("sync", 0, None), ("async", 7, None)])
def test_the_ledger_has_a_digest_where_anybody_would_have_computed_the_same(kept, strategy, digest, written):
    kept.merge(1, 0, 2, digest, STRATEGIES[strategy])
    assert kept.rows("SELECT step, first_batch, last_batch, digest FROM ledger") == [(0, 0, 1, written)]


def test_what_another_has_computed_too_is_verified(kept):
    kept.merge(1, 0, 2)
    kept.merge(2, 2, 4)
    kept.record.confirmed(1, Block(0, 2), by=2)
    assert kept.counts == {1: (2, 16, 16), 2: (2, 16, 0)}
    assert kept.rows("SELECT * FROM verified") == [(1, 16)]
    kept.close(0)
    kept.record.confirmed(1, Block(0, 2), by=2)  # of an older step: late, and still true
    kept.merge(2, 12, 13)
    kept.record.confirmed(2, Block(12, 13), by=1)
    assert kept.rows("SELECT * FROM verified") == [(1, 32), (2, 4)]


@pytest.mark.parametrize("is_written", [False, True])
def test_what_is_void_counts_for_nobody(kept, is_written):
    kept.merge(1, 0, 4, digest=1)
    kept.record.confirmed(1, Block(0, 4), by=2)
    kept.close(0)
    kept.merge(2, 4, 6, digest=2)
    kept.merge(1, 6, 8, digest=3)
    kept.record.confirmed(2, Block(4, 6), by=1)
    if is_written:
        assert len(kept.rows("SELECT * FROM ledger")) == 3
        assert kept.rows("SELECT * FROM verified") == [(1, 32), (2, 16)]
    kept.record.void(2)
    assert kept.counts == {1: (4, 32, 32), 2: (0, 0, 0)}
    assert kept.rows("SELECT step, node, digest FROM ledger") == [(0, 1, 1)]
    assert kept.rows("SELECT * FROM verified") == [(1, 32), (2, 0)]
    kept.merge(1, 4, 8, digest=4)
    kept.close(1)
    assert kept.rows("SELECT step, node, digest FROM ledger") == [(0, 1, 1), (1, 1, 4)]
    assert kept.rows("SELECT step, loss FROM steps") == [(0, 0.5), (1, 0.5)]
    kept.record.void(2)  # it was made: there is nothing left that could be void
    assert kept.counts == {1: (8, 64, 32), 2: (0, 0, 0)}


def test_a_void_version_before_anything_was_merged_is_nothing(kept):
    kept.record.void(1)
    assert kept.counts == {1: (0, 0, 0), 2: (0, 0, 0)}


def test_what_was_verified_goes_on_with_the_run(kept):
    kept.merge(1, 0, 4)
    kept.record.confirmed(1, Block(0, 2), by=2)
    kept.close(0)
    assert kept.rows("SELECT * FROM verified") == [(1, 16)]
    nodes = [totals_of(node, part, None) for node, part in kept.record.parts.items()]
    assert [totals.verified_samples for totals in nodes] == [16, 0]
    kept.merge(2, 4, 8)
    kept.record.confirmed(2, Block(4, 8), by=1)
    assert kept.rows("SELECT * FROM verified") == [(1, 16), (2, 32)]
    again = Record(kept.db, SCHEDULE, REAL)
    again.go_on_from(Position(version=1, steps=1, front=4), {}, {it.node: it.part for it in nodes})
    assert kept.disk.read("SELECT * FROM verified") == [(1, 16)], "what came later is computed again"
    assert again.parts[1] == Part("n1", 1, 4, 32, 16)
    assert NodeTotals(1, "an older checkpoint's", 1).part.verified == 0
