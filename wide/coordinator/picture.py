"""A run's snapshot, from the pool and the record. Knows both, and changes neither."""

from __future__ import annotations

from collections.abc import Iterable

from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.telemetry.snapshot import NodeView, Snapshot


def picture(
    pool: Pool, record: Record, nodes: Iterable[NodeView], now: float, busy_s_per_update: float = 0.0
) -> Snapshot:
    return Snapshot(
        at=now,
        strategy=pool.strategy.name,
        version=pool.version,
        steps=pool.last_step,
        seconds=pool.seconds,
        step=len(record.losses),
        epoch=record.epoch,
        batches=record.batches,
        loss=record.losses[-1] if record.losses else float("nan"),
        elapsed_s=record.seconds,
        before=record.before,
        started_at=record.started_at,
        nodes=tuple(nodes),
        waits_for=pool.policy.waits_for,
        busy_s_per_update=busy_s_per_update,
        metrics=record.metrics,
    )
