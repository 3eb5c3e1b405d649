"""What a pool's picture says about how it should train. Reads snapshots; carries nothing out.

`--strategy auto` asks for a plan when all nodes were measured, and now and then again; `wide plan` asks once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from wide.codec.ladder import LOSSLESS
from wide.coordinator.events import Event, StopRequested, StrategyChosen
from wide.errors import NotYet
from wide.job.schedule import Schedule
from wide.strategy.catalogue import EXACT
from wide.strategy.description import Setting
from wide.strategy.plan import Plan, plan
from wide.strategy.why import measured, why_slow
from wide.telemetry.log import log
from wide.telemetry.snapshot import Snapshot

LEAST_UPDATES = 3  # of a node, until its speed is known
LEAST_S = 2.0
AGAIN_S = 10.0
DRIFT = 1.25  # another strategy must be so much quicker, before a pool changes


class Planner:
    """Looks at snapshots as they are made. `tell` writes down what was found, if that is news. If it only plans, the
    run is over with the first plan, and `words` are that.
    """

    def __init__(
        self, schedule: Schedule, live_nbytes: int, tell: Callable[[int, str, str, str], None], only_plans: bool
    ) -> None:
        self._schedule, self._live_nbytes, self._tell, self._only_plans = schedule, live_nbytes, tell, only_plans
        self._told = ""
        self._began_at: float | None = None
        self._planned_at = -AGAIN_S
        self.words = ""

    def look(self, snapshot: Snapshot, now: float) -> Event | None:
        """What should be done about it, when it is time for that."""
        if self._began_at is None and snapshot.nodes:
            self._began_at = now
        if self._began_at is None or now - self._began_at < LEAST_S or now - self._planned_at < AGAIN_S:
            return None
        found = plan_for(snapshot, self._schedule)
        if found is None:
            return None
        self._planned_at = now
        self._tell_news(found)
        if self._only_plans:
            self.words = as_json(found, snapshot, self._live_nbytes)
            return StopRequested("planned")
        return StrategyChosen(found.strategy) if is_better(found, snapshot.strategy) else None

    def _tell_news(self, found: Plan) -> None:
        if self._told == found.strategy:
            return
        self._told = found.strategy
        self._tell(0, "strategy", found.strategy, found.reason)
        log.info("%s: %s", found.strategy, found.reason)
        for words in found.burdens.values():
            log.info("%s", words)

    @staticmethod
    def answer(snapshot: Snapshot, schedule: Schedule, live_nbytes: int) -> str:
        """To somebody who asks how this pool should train: as JSON."""
        if (found := plan_for(snapshot, schedule)) is None:
            here = len(snapshot.nodes)
            raise NotYet(f"{here} nodes are here and not all were measured yet: ask again in a moment")
        return as_json(found, snapshot, live_nbytes)


def plan_for(snapshot: Snapshot, schedule: Schedule) -> Plan | None:
    """None: not all nodes were measured yet."""
    links = [view.link for view in snapshot.nodes if not view.is_silent]
    if not links or any(link is None or link.updates < LEAST_UPDATES for link in links):
        return None
    nodes = measured(snapshot)
    if len(nodes) < len(links):
        return None
    return plan(nodes, Setting(schedule.batches_per_step, snapshot.busy_s_per_update))


def is_better(found: Plan, current: str) -> bool:
    """Is it worth the trouble to change?"""
    if found.strategy == current:
        return False
    gain = found.forecasts[found.strategy].batches_per_s / found.forecasts[current].batches_per_s
    return gain > DRIFT or (found.strategy == EXACT.name and gain > 1 / DRIFT)  # exact, if it costs little


def as_json(found: Plan, snapshot: Snapshot, live_nbytes: int) -> str:
    """As `wide plan --json` prints it."""
    return msgspec.json.encode(describe(found, snapshot, live_nbytes)).decode()


def describe(found: Plan, snapshot: Snapshot, live_nbytes: int) -> dict[str, Any]:
    picked = found.forecasts[found.strategy]
    return {
        "schema": "wide.plan/1",
        "strategy": found.strategy,
        "reason": found.reason,
        "batches_per_s": picked.batches_per_s,
        "utilisation": picked.utilisation,
        "update_nbytes": live_nbytes,
        "lossless": list(LOSSLESS),
        "why_slow": [finding.words for finding in why_slow(snapshot)],
        "forecasts": {
            name: {
                "batches_per_s": f.batches_per_s,
                "utilisation": f.utilisation,
                "by_codec": f.by_codec,
                "is_exact": name == EXACT.name,
            }
            for name, f in found.forecasts.items()
        },
        "nodes": [
            {
                "node": view.totals.node,
                "name": view.totals.name,
                "batches_per_s": view.link.computes_batches_per_s,
                "up_mbit": view.link.up_bytes_per_s * 8e-6,
                "down_mbit": view.link.down_bytes_per_s * 8e-6,
                "delay_ms": view.link.delay_s * 1000,
                "codecs": view.link.codecs,
                "burden": found.burdens.get(view.totals.node, ""),
                "is_here": view.link.is_here,
            }
            for view in snapshot.nodes
            if view.link is not None
        ],
    }
