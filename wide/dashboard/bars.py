"""The lease timeline for a page: a picture of any stretch of a run; or, where there are few enough, each lease as a
bar, and why a node had nothing to do between two of them. Knows leases.
"""

from __future__ import annotations

import base64
import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wide.dashboard.charts import listed
from wide.dashboard.leases import PARTS, Floats, Leases
from wide.dashboard.timeline import GAP_PIXELS, KINDS, MEANINGS, ROW_PIXELS, Window, drawn, png
from wide.store.reading import Reading
from wide.wire import words

FEW = 3000  # leases that are told of one by one
MOST_LINES = 400  # versions
LEAST_GAP_S = 1e-4
NOTHING = "no work for it in this time"
LEFT = "SELECT node, name, joined_at, left_at, why FROM nodes ORDER BY rowid"

Data = dict[str, Any]


class Span(NamedTuple):
    """From one moment to another (None: the run's first, or last); or so many seconds before its last."""

    start: float | None = None
    end: float | None = None
    last_s: float | None = None


def picture(leases: Leases, run: Reading, span: Span, columns: int, rows: slice) -> Data:
    """Times are in seconds after the run's first lease."""
    everybody = sorted(leases.amounts)
    origin, last = leases.span
    start = origin if span.start is None else origin + span.start
    end = last if span.end is None else origin + span.end
    if span.last_s is not None:
        start, end = last - span.last_s, last
    nodes = everybody[rows]
    window = Window(start, max(end, start + 1e-6), columns, nodes)
    told: Data = {
        "origin": origin,
        "last_s": last - origin,
        "from_s": window.began_at - origin,
        "to_s": window.ended_at - origin,
        "leases": leases.count,
        "nodes": nodes,
        "nodes_in_all": len(everybody),
        "row_pixels": ROW_PIXELS,
        "gap_pixels": GAP_PIXELS,
        "kinds": {kind: [colour, MEANINGS.get(kind, kind)] for kind, colour in KINDS.items()},
        "lives": _lives(run, set(nodes), origin),
        "parts": list(PARTS),
    }
    if not leases.count:
        return told
    if (few := leases.few_between(window.began_at, window.ended_at, FEW)) is not None:
        mine = np.isin(few[0]["node"], nodes)
        return told | _bars(leases, few[0][mine], few[1][mine], window, origin)
    data = png(drawn(leases, window, run))
    return told | {"png": "data:image/png;base64," + base64.b64encode(data).decode()}


def _lives(run: Reading, nodes: set[int], origin: float) -> list[list[Any]]:
    """[node, name, since when, until when, why it left]."""
    return [
        [node, words.line(str(name)), (joined or origin) - origin, None if left is None else left - origin, _why(why)]
        for node, name, joined, left, why in run.rows("nodes", LEFT)
        if node in nodes
    ]


def _why(text: Any) -> str:
    return words.line(str(text or ""))


def _bars(leases: Leases, rows: npt.NDArray[Any], stations: Floats, window: Window, origin: float) -> Data:
    order = np.lexsort((stations[:, 0], rows["node"]))
    rows, stations = rows[order], stations[order]
    made = _made(rows, stations)
    versions = sorted(made.items(), key=lambda item: item[1][0])
    versions = versions if len(versions) <= MOST_LINES else []
    return {
        "bars": {
            "node": rows["node"].tolist(),
            "lease": rows["lease"].tolist(),
            "step": (rows["step"] + 1).tolist(),
            "version": rows["version"].tolist(),
            "first_batch": rows["first_batch"].tolist(),
            "batches": rows["batches"].tolist(),
            "codec": [leases.words[number] for number in rows["codec"]],
            "refused": [leases.words[number] for number in rows["refused"]],
            "loss": listed(rows["loss"].astype(np.float64)),
            "at_s": [[round(at, 6) for at in moments] for moments in (stations - origin).tolist()],
        },
        "gaps": _gaps(rows, stations, made, origin) + _edges(rows, stations, window, origin),
        "versions": [[version, at - origin] for version, (at, _) in versions],
    }


def _made(rows: npt.NDArray[Any], stations: Floats) -> dict[int, tuple[float, int]]:
    """By version: when the last update that is part of it was merged, and whose that was."""
    found: dict[int, tuple[float, int]] = {}
    merged_at = stations[:, 0] + rows["merged_s"]
    for version, at, node in zip(rows["version"].tolist(), merged_at.tolist(), rows["node"].tolist(), strict=True):
        if version >= 0 and at > found.get(version, (-math.inf, 0))[0]:
            found[version] = (at, node)
    return found


def _gaps(
    rows: npt.NDArray[Any], stations: Floats, made: dict[int, tuple[float, int]], origin: float
) -> list[list[Any]]:
    """[node, from, to, why it had nothing to do], between two leases of one node."""
    found = []
    for i in range(len(rows) - 1):
        before, after = rows[i], rows[i + 1]
        if before["node"] != after["node"]:
            continue
        start, end = float(stations[i, -1]), float(stations[i + 1, 0])
        if end - start < LEAST_GAP_S:
            continue
        found.append([int(before["node"]), start - origin, end - origin, _reason(before, after, made)])
    return found


def _edges(rows: npt.NDArray[Any], stations: Floats, window: Window, origin: float) -> list[list[Any]]:
    """The same, before the first lease of each node that is seen here, and after its last."""
    found = []
    for node in np.unique(rows["node"]).tolist():
        mine = stations[rows["node"] == node]
        spans = ((window.began_at, float(mine[0, 0])), (float(mine[:, -1].max()), window.ended_at))
        found += [[node, a - origin, b - origin, NOTHING] for a, b in spans if b - a >= LEAST_GAP_S]
    return found


def _reason(before: Any, after: Any, made: dict[int, tuple[float, int]]) -> str:
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
