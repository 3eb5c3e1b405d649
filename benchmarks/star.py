"""`star`: where the coordinator's link ends a star, by the formula and by the simulator (faults/star.py): the time of a
version, and the part of its nodes' computing that a pool uses. Virtual time: how busy this machine is does not matter.

A version of `sync` takes batch + 2·N·M/B: weights of M bytes to N nodes, which all arrive together because TCP shares
the link of B bytes/s, and as many updates back. `local` pays that once in a round of H steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from faults.star import Star

GBIT = 125e6  # bytes/s
SHORTEST_ROUND = 2  # steps of `local`: the simulated pool keeps to them


class Point(NamedTuple):
    """A pool: N nodes that compute a batch in `batch_s`, and M bytes each way for a version."""

    strategy: str
    nodes: int
    payload_nbytes: float
    link_gbit: float
    batch_s: float
    window_s: float

    @property
    def travel_s(self) -> float:
        return 2 * self.nodes * self.payload_nbytes / (self.link_gbit * GBIT)

    @property
    def least(self) -> float:
        """The part of its nodes' time that computing is, if nobody computes while bytes travel."""
        steps_s = self.batch_s * (SHORTEST_ROUND if self.strategy == "local" else 1)
        return steps_s / (steps_s + self.travel_s)

    @property
    def most(self) -> float:
        """If everybody does: then the link is full, one way."""
        steps_s = self.batch_s * (SHORTEST_ROUND if self.strategy == "local" else 1)
        return min(1.0, 2 * steps_s / self.travel_s)


POINTS = (
    Point("sync", 10, 4.5e6, 1, 1.0, 10),
    Point("sync", 100, 4.5e6, 1, 1.0, 10),
    Point("sync", 1000, 4.5e6, 10, 1.0, 1),
    Point("sync", 10_000, 62.5e3, 1, 10.0, 1),
    Point("local", 10, 4.5e6, 1, 1.0, 40),
    Point("local", 100, 4.5e6, 1, 1.0, 60),
    Point("async", 10, 4.5e6, 1, 1.0, 30),
    Point("async", 100, 4.5e6, 1, 1.0, 20),
)


def run(repeats: int, say: Callable[[str], None], nodes: int = 10_000) -> dict[str, Any]:
    """Of pools with at most so many nodes. It is the same every time, so it is done once."""
    say("about 2 minutes with --nodes 1000; many more with 10,000 nodes, which is the default")
    rows = []
    for point in POINTS:
        if point.nodes > nodes:
            continue
        began = time.perf_counter()
        star = Star(*point[:3], point.link_gbit * GBIT, *point[4:]).run()
        row = point._asdict() | {"utilisation": star.utilisation, "version_s": 1 / star.versions_per_s}
        row |= {"formula": point.least, "bound": point.most, "took_s": time.perf_counter() - began}
        rows.append(row)
        say(
            f"{point.strategy:<6}{point.nodes:>7,} nodes, {point.payload_nbytes / 1e6:.4g} MB at "
            f"{point.link_gbit} Gbit/s, batches of {point.batch_s:g} s: a version every {row['version_s']:.3f} s; "
            f"{star.utilisation:.3f} of the computing, formula {point.least:.3f}, bound {point.most:.3f}"
        )
    exact = [abs(row["utilisation"] / row["formula"] - 1) for row in rows if row["strategy"] == "sync"]
    return {"points": rows, "nodes_max": max(row["nodes"] for row in rows), "sync_error": max(exact)}
