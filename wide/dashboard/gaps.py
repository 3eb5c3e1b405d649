"""Why a node had nothing to do: between two leases, before its first and after its last; while it was there, and not
while it was not. Knows leases, who was there when, and when the run was paused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from wide.dashboard.leases import Floats
from wide.store.reading import Reading

LEAST_S = 1e-4
NOTHING = "no work for it in this time"
PAUSED = "the run was paused by its owner"
ASKED = """SELECT at, words FROM events WHERE kind = 'asked' AND (words LIKE 'pause:%' OR words LIKE 'resume:%')
    ORDER BY rowid"""

Made = dict[int, tuple[float, int]]
Stretch = tuple[float, float]
Gap = tuple[float, float, str]


def pauses(run: Reading) -> list[Stretch]:
    """From when to when nothing was leased because somebody said so."""
    found: list[Stretch] = []
    since: float | None = None
    for at, said in run.rows("events", ASKED):
        if str(said).startswith("pause"):
            since = at if since is None else since
        elif since is not None:
            found.append((since, at))
            since = None
    return [*found, (since, math.inf)] if since is not None else found


def made_by(rows: npt.NDArray[Any], stations: Floats) -> Made:
    """By version: when the last update that is part of it was merged, and whose that was."""
    found: Made = {}
    merged_at = stations[:, 0] + rows["merged_s"]
    for version, at, node in zip(rows["version"].tolist(), merged_at.tolist(), rows["node"].tolist(), strict=True):
        if version >= 0 and at > found.get(version, (-math.inf, 0))[0]:
            found[version] = (at, node)
    return found


def gaps_of(
    rows: npt.NDArray[Any],
    stations: Floats,
    made: Made,
    present: Sequence[Stretch],
    paused: Sequence[Stretch],
    window: Stretch,
) -> list[Gap]:
    """Of one node, whose leases these are, in their order; within the window."""
    found: list[Gap] = []
    end = window[0]
    for i in range(len(rows)):
        reason = _reason(rows[i - 1], rows[i], made) if i else NOTHING
        found.append((end, float(stations[i, 0]), reason))
        end = max(end, float(stations[i, -1]))
    found.append((end, window[1], NOTHING))
    seen = [(max(a, c), min(b, d), why) for a, b, why in found for c, d in present]
    return [(a, b, _or_paused(a, b, why, paused)) for a, b, why in seen if b - a >= LEAST_S]


def _or_paused(start: float, end: float, why: str, paused: Sequence[Stretch]) -> str:
    covered = sum(max(0.0, min(end, until) - max(start, since)) for since, until in paused)
    return PAUSED if covered > 0.5 * (end - start) else why


def _reason(before: Any, after: Any, made: Made) -> str:
    version = int(before["version"])
    if version < 0:
        return "its update did not count; then it waited for work"
    if after["version"] == version:
        return "nothing was free: others had the rest of the step"
    if after["version"] > version + 1:
        return f"no work for it until version {after['version']}: others were quicker, or had their turn"
    whose = made.get(version, (0.0, -1))[1]
    if whose == before["node"]:
        return f"waited until version {version} was made; its own update was the last"
    return f"waited for version {version}: the last update came from node {whose}"


def of_node(rows: npt.NDArray[Any], stations: Floats, node: int) -> tuple[npt.NDArray[Any], Floats]:
    mine = np.flatnonzero(rows["node"] == node)
    return rows[mine], stations[mine]
