"""What a pool measures about itself, and the plan that follows. Knows peers and their codecs; carries nothing out.

`--strategy auto` asks for a plan when all nodes were measured, and now and then again; `wide plan` asks once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from wide.coordinator.choices import Choices
from wide.coordinator.peer import Peer
from wide.coordinator.record import Record
from wide.errors import NotYet
from wide.strategy.plan import Measured, Plan, Setting, plan
from wide.telemetry.log import log

LEAST_UPDATES = 3  # of a node, until its speed is known
LEAST_S = 2.0
AGAIN_S = 10.0
DRIFT = 1.25  # another strategy must be so much quicker, before a pool changes


class Planner:
    """`busy` tells how long the coordinator's loop has been busy, all in all, and with how many updates."""

    def __init__(self, choices: Choices, record: Record, busy: Callable[[], tuple[float, int]]) -> None:
        self._choices, self._record, self._busy = choices, record, busy
        self._told: Plan | None = None
        self._began_at: float | None = None
        self._planned_at = 0.0

    def due(self, peers: list[Peer], now: float) -> Plan | None:
        """A plan, when it is time for one."""
        if self._began_at is None and peers:
            self._began_at = now
        if self._began_at is None or now - self._began_at < LEAST_S or now - self._planned_at < AGAIN_S:
            return None
        found = self.now(peers)
        self._planned_at = now if found is not None else self._planned_at
        return found

    def now(self, peers: list[Peer]) -> Plan | None:
        """None: not all nodes were measured yet."""
        if not peers or any(peer.updates < LEAST_UPDATES for peer in peers):
            return None
        busy_s, updates = self._busy()
        nodes = [Measured(peer.node, peer.name, peer.batches_per_s, self._choices.travel(peer)) for peer in peers]
        return plan(nodes, Setting(self._record.schedule.batches_per_step, busy_s / max(updates, 1)))

    def answer(self, peers: list[Peer]) -> str:
        """To somebody who asks how this pool should train: as JSON."""
        if (found := self.now(peers)) is None:
            raise NotYet(f"{len(peers)} nodes are here and not all were measured yet: ask again in a moment")
        return self.words(found, peers)

    def words(self, found: Plan, peers: list[Peer]) -> str:
        return msgspec.json.encode(describe(found, peers, self._choices.live_nbytes)).decode()

    def tell(self, found: Plan) -> None:
        """If it is news."""
        if self._told is not None and self._told.strategy == found.strategy:
            return
        self._told = found
        self._record.chose(0, "strategy", found.strategy, found.reason)
        log.info("%s: %s", found.strategy, found.reason)
        for words in found.burdens.values():
            log.info("%s", words)


def is_better(found: Plan, current: str) -> bool:
    """Is it worth the trouble to change?"""
    if found.strategy == current:
        return False
    gain = found.forecasts[found.strategy].batches_per_s / found.forecasts[current].batches_per_s
    return gain > DRIFT or (found.strategy == "sync" and gain > 1 / DRIFT)  # exact, if it costs little


def describe(found: Plan, peers: list[Peer], live_nbytes: int) -> dict[str, Any]:
    """As `wide plan --json` prints it."""
    picked = found.forecasts[found.strategy]
    return {
        "schema": "wide.plan/1",
        "strategy": found.strategy,
        "reason": found.reason,
        "batches_per_s": picked.batches_per_s,
        "utilisation": picked.utilisation,
        "update_nbytes": live_nbytes,
        "forecasts": {
            name: {"batches_per_s": f.batches_per_s, "utilisation": f.utilisation, "by_codec": f.by_codec}
            for name, f in found.forecasts.items()
        },
        "nodes": [
            {
                "node": peer.node,
                "name": peer.name,
                "batches_per_s": peer.batches_per_s,
                "up_mbit": peer.up.bytes_per_s * 8e-6 if peer.up else None,
                "down_mbit": peer.down.bytes_per_s * 8e-6 if peer.down else None,
                "delay_ms": peer.up.delay_s * 1000 if peer.up else None,
                "codecs": dict(peer.codecs),
                "burden": found.burdens.get(peer.node, ""),
            }
            for peer in peers
        ],
    }
