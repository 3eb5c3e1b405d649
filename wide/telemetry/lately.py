"""How quick things are lately: of each node and of the pool, by what was counted a few seconds ago. Knows totals."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from wide.telemetry.snapshot import Recent
from wide.telemetry.totals import NodeTotals

RECENT_S = 10.0
EVERY_S = 1.0  # a count is kept


class Counted(NamedTuple):
    """All that was done by a moment."""

    at: float
    steps: int
    batches: int
    busy_s: float  # of the coordinator's loop
    evaluating_s: float  # in which everybody waited for that
    nodes: dict[int, NodeTotals]


class Pace(NamedTuple):
    """Lately, in a second."""

    steps_per_s: float
    batches_per_s: float
    busy: float
    evaluating: float
    nodes: dict[int, Recent]


class Lately:
    """Count as often as you like; what is told is about the last seconds. Where nothing happens any more, it falls."""

    def __init__(self, recent_s: float = RECENT_S) -> None:
        self._recent_s = recent_s
        self._seen: deque[Counted] = deque()

    def count(
        self,
        at: float,
        steps: int,
        batches: int,
        nodes: Iterable[NodeTotals],
        busy_s: float = 0.0,
        evaluating_s: float = 0.0,
    ) -> Pace:
        now = Counted(at, steps, batches, busy_s, evaluating_s, {totals.node: totals for totals in nodes})
        if len(self._seen) == 1 and self._seen[0].batches == batches:
            self._seen.clear()  # it has not begun yet
        if not self._seen or at - self._seen[-1].at >= EVERY_S:
            self._seen.append(now)
        while len(self._seen) > 2 and self._seen[1].at <= at - self._recent_s:
            self._seen.popleft()
        then = self._seen[0]
        if (elapsed_s := at - then.at) <= 0:
            return Pace(0.0, 0.0, 0.0, 0.0, {})
        return Pace(
            (steps - then.steps) / elapsed_s,
            (batches - then.batches) / elapsed_s,
            min(1.0, max(0.0, busy_s - then.busy_s) / elapsed_s),
            min(1.0, max(0.0, evaluating_s - then.evaluating_s) / elapsed_s),
            {node: self._recent(totals, at) for node, totals in now.nodes.items()},
        )

    def _recent(self, now: NodeTotals, at: float) -> Recent:
        """Since it was first seen, if that is not long ago."""
        since, before = next(((c.at, c.nodes[now.node]) for c in self._seen if now.node in c.nodes), (at, now))
        elapsed_s = at - since
        if elapsed_s <= 0:
            return Recent()

        def part(seconds: float) -> float:
            return min(1.0, max(0.0, seconds) / elapsed_s)

        travel_s, network_s = now.travel_s - before.travel_s, now.network_s - before.network_s
        return Recent(
            (now.batches - before.batches) / elapsed_s,
            part(now.compute_s - before.compute_s),
            part(now.fetch_s - before.fetch_s),
            part(now.codec_s - before.codec_s),
            part(travel_s),
            part(network_s - travel_s),
            (now.bytes_sent - before.bytes_sent) / elapsed_s,
            (now.bytes_received - before.bytes_received) / elapsed_s,
        )


def time_left(
    step: int, steps: int | None, steps_per_s: float, seconds: float | None, elapsed_s: float
) -> float | None:
    """By the steps still to do or by the clock, whichever ends first."""
    limits = []
    if steps is not None and steps_per_s > 0:
        limits.append((steps - step) / steps_per_s)
    if seconds is not None:
        limits.append(seconds - elapsed_s)
    return max(0.0, min(limits)) if limits else None
