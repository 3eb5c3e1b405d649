"""The lease timeline for a page: a picture of any stretch of a run; or, where there are few enough, each lease as a
bar, and why a node had nothing to do between two of them. Knows leases.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wide.dashboard.charts import listed
from wide.dashboard.gaps import gaps_of, made_by, of_node, pauses
from wide.dashboard.leases import PARTS, Floats, Leases
from wide.dashboard.timeline import GAP_PIXELS, KINDS, MEANINGS, ROW_PIXELS, Window, drawn, png
from wide.store.reading import Reading
from wide.wire import words

FEW = 3000  # leases that are told of one by one
MOST_LINES = 400  # versions
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
        "ended_s": max([last, *(left for *_, left, _ in run.rows("nodes", LEFT) if left)]) - origin,
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
        return told | _bars(leases, run, few[0][mine], few[1][mine], window)
    data = png(drawn(leases, window, run))
    return told | {"png": "data:image/png;base64," + base64.b64encode(data).decode()}


def _lives(run: Reading, nodes: set[int], origin: float) -> list[list[Any]]:
    """[node, name, since when, until when, why it left]."""
    return [
        [node, words.line(str(name)), (joined or origin) - origin, None if left is None else left - origin, _why(why)]
        for node, name, joined, left, why in run.rows("nodes", LEFT)
        if node in nodes
    ]


def _present(run: Reading, nodes: Sequence[int]) -> dict[int, list[tuple[float, float]]]:
    """When each of them was there."""
    found: dict[int, list[tuple[float, float]]] = {node: [] for node in nodes}
    for node, _, joined, left, _ in run.rows("nodes", LEFT):
        if node in found:
            found[node].append((joined or 0.0, math.inf if left is None else left))
    return found


def _why(text: Any) -> str:
    return words.line(str(text or ""))


def _bars(leases: Leases, run: Reading, rows: npt.NDArray[Any], stations: Floats, window: Window) -> Data:
    origin, last = leases.span
    shown = (max(window.began_at, origin), min(window.ended_at, last))
    paused, present = pauses(run), _present(run, window.nodes)
    order = np.lexsort((stations[:, 0], rows["node"]))
    rows, stations = rows[order], stations[order]
    made = made_by(rows, stations)
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
        "gaps": [
            [node, start - origin, end - origin, why]
            for node in window.nodes
            for start, end, why in gaps_of(*of_node(rows, stations, node), made, present[node], paused, shown)
        ],
        "versions": [[version, at - origin] for version, (at, _) in versions],
    }
