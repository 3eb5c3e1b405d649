"""A run's snapshot, from the pool and the record. Knows both, and changes neither."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.strategy.catalogue import EXACT
from wide.telemetry.lately import Lately, time_left
from wide.telemetry.snapshot import NodeView, Snapshot


class Shell(NamedTuple):
    """What only the shell around a pool knows: how busy it was, all in all and with each update; for how long everybody
    has waited for evaluate(), and how long that took at most; how long a checkpoint took; what the job is called, and
    whether its bits are those of any pool.
    """

    job: str = ""
    is_lossless: bool = True
    busy_s: float = 0.0
    busy_s_per_update: float = 0.0
    evaluating_s: float = 0.0
    evaluation_s: float = 0.0
    checkpoint_s: float = 0.0


def picture(
    pool: Pool, record: Record, nodes: Iterable[NodeView], now: float, shell: Shell, lately: Lately
) -> Snapshot:
    views, steps = tuple(nodes), len(record.losses)
    totals = (view.totals for view in views)
    pace = lately.count(now, steps, record.batches, totals, shell.busy_s, shell.evaluating_s)
    elapsed_s = record.elapsed_s(now)
    loss = record.losses[-1] if steps else math.nan
    return Snapshot(
        at=now,
        strategy=pool.strategy.name,
        version=pool.version,
        steps=pool.last_step,
        seconds=pool.seconds,
        step=steps,
        epoch=record.epoch,
        batches=record.batches,
        loss=_finite(loss),
        losses=record.few_losses.means,
        elapsed_s=elapsed_s,
        before=record.before,
        started_at=record.started_at,
        left_s=time_left(steps, pool.last_step, pace.steps_per_s, pool.seconds, elapsed_s),
        nodes=tuple(view._replace(recent=pace.nodes.get(view.totals.node, view.recent)) for view in views),
        waits_for=pool.policy.waits_for,
        busy_s_per_update=shell.busy_s_per_update,
        metrics={name: _finite(value) for name, value in record.metrics.items()},
        events=tuple(record.journal.events),
        job=shell.job,
        is_exact=shell.is_lossless and pool.strategy is EXACT,
        batches_per_step=record.schedule.batches_per_step,
        batches_per_s=pace.batches_per_s,
        steps_per_s=pace.steps_per_s,
        busy=pace.busy,
        evaluating=pace.evaluating,
        evaluation_s=shell.evaluation_s,
        checkpoint_s=shell.checkpoint_s,
        rows_waiting=record.db.waiting,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
