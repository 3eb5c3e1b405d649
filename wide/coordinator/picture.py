"""A run's snapshot, from the pool and the record. Knows both, and changes neither.

`Painter` makes those of a pool whose nodes are elsewhere; what each is, and where, is told to it as they come and go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from wide.coordinator.record import Record
from wide.coordinator.state import Pool
from wide.exchange.exchange import Exchange
from wide.strategy.catalogue import EXACT
from wide.strategy.why import explained, possible, utilisation
from wide.telemetry.lately import Lately, time_left
from wide.telemetry.snapshot import NodeView, Snapshot
from wide.telemetry.totals import totals_of

WHY_S, WHY_NODES = 2.0, 64  # what is in the way is looked for again; with more nodes than this, so much less often
PAUSED = "paused by its owner: nothing is leased until it goes on"


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


class Home(NamedTuple):
    """Where a node lives: as NodeView has it."""

    host: str = ""
    machine: str = ""
    cores: int = 0
    build: str = ""


class Painter:
    """`homes` are of the nodes that are there."""

    def __init__(self, pool: Pool, record: Record, exchange: Exchange) -> None:
        self._pool, self._record, self._exchange = pool, record, exchange
        self.homes: dict[int, Home] = {}
        self._lately = Lately()
        self._why_at, self._seen = -WHY_S, Snapshot(0.0)  # when it was last asked what is in the way, and of what

    def paint(self, now: float, shell: Shell) -> Snapshot:
        views = [self._view(node) for node in self._pool.members if node in self._record.parts]
        snapshot = picture(self._pool, self._record, views, now, shell, self._lately)
        if now - self._why_at >= WHY_S * max(1.0, len(views) / WHY_NODES):
            self._why_at, self._seen = now, with_verdict(snapshot)
        return _as_seen(snapshot, self._seen)

    def _view(self, node: int) -> NodeView:
        member, home = self._pool.members[node], self.homes.get(node, Home())
        return NodeView(
            totals_of(node, self._record.parts[node], self._exchange.traffic.get(node)),
            self._exchange.link_view(node),
            member.is_silent,
            len(member.leases),
            home.host,
            home.machine,
            home.cores,
            build=home.build,
            staleness=member.staleness,
        )


def with_verdict(run: Snapshot) -> Snapshot:
    """And what holds it up, what it could do, and how much of that it does."""
    why_slow, verdict = explained(run)
    return _as_seen(
        run, replace(run, why_slow=why_slow, verdict=verdict, possible=possible(run), used=utilisation(run))
    )


def _as_seen(run: Snapshot, then: Snapshot) -> Snapshot:
    """As it was seen a moment ago; while it is paused, that is what holds it up."""
    why_slow, verdict = ((), PAUSED) if run.is_paused else (then.why_slow, then.verdict)
    return replace(run, why_slow=why_slow, verdict=verdict, possible=then.possible, used=then.used)


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
        is_paused=pool.is_paused,
    )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
