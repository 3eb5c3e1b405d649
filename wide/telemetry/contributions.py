"""Who contributes what, lately: what a node is told of itself, and which node is of no use. Knows snapshots."""

from __future__ import annotations

from typing import NamedTuple

from wide.telemetry.snapshot import NodeView, Snapshot

IDLE_S, EACH_S = 30.0, 0.5  # until a node is of no use; more for each node: they may have to take turns
TELL_S = 2.0  # nodes are told how they are doing


class Contribution(NamedTuple):
    """Of one node, since the last look: batches that were merged, all in all and in a second."""

    node: int
    batches: int
    per_s: float


class Contributions:
    """Look now and then; so often there is something to tell."""

    def __init__(self, every_s: float = IDLE_S) -> None:
        self._every_s = every_s
        self._before: Snapshot | None = None
        self._named: set[int] = set()

    def look(self, run: Snapshot) -> tuple[list[Contribution], list[str]]:
        """What each node has done since the last time, and in words who has done nothing, once."""
        if self._before is None:
            self._before = run if run.started_at is not None else None
            return [], []
        before, elapsed_s = self._before, run.at - self._before.at
        if elapsed_s < self._every_s + EACH_S * len(run.nodes):
            return [], []
        self._before = run
        earlier = {view.totals.node: view.totals.batches for view in before.nodes}
        told, idle = [], []
        for view in run.nodes:
            number, batches = view.totals.node, view.totals.batches
            if number not in earlier:
                continue
            told.append(Contribution(number, batches, (batches - earlier[number]) / elapsed_s))
            if batches == earlier[number] and run.batches > before.batches and number not in self._named:
                self._named.add(number)
                idle.append(_why(view, run, before, elapsed_s))
        return told, idle


def _why(view: NodeView, run: Snapshot, before: Snapshot, elapsed_s: float) -> str:
    who = f"node {view.totals.node} ({view.totals.name}) has contributed nothing for {elapsed_s:.0f} s"
    if view.is_silent:
        return f"{who}: it is silent"
    step_s = elapsed_s / max(1, run.step - before.step)
    travels = view.link.travel_s.values() if view.link is not None else ()
    fastest_s = min((sum(way) for way in travels), default=0.0)
    if fastest_s > step_s:
        return (
            f"{who}: an update and new weights travel {fastest_s:.2g} s on its link, and the others make a step in "
            f"{step_s:.2g} s. --strategy local needs far less of a link (its result is not exact); or let it go"
        )
    return f"{who}: the others are done before it is, with all there is. More batches_per_step would give it work"
