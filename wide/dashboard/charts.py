"""A run's numbers as a page draws them: few points, evenly taken, nothing lost in between. Knows run.db's series."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from wide.store.reading import Reading
from wide.wire import words

Data = dict[str, Any]
Floats = npt.NDArray[np.float64]
MOST_NODES = 24  # with a curve of their own; what the others did is one curve
COUNTED = ("batches", "bytes_sent", "bytes_received", "raw_bytes", "codec_s", "compute_s", "travel_s")
MOST_CHARS = 400  # of what is told of an event
OWN = ("loop_max_ms", "loop_busy", "coordinator_rss_bytes")


def losses(run: Reading, first: float | None, last: float | None, points: int) -> Data:
    """Of steps between these two, counted from 1: the mean of each few, and between what they lie."""
    rows = run.rows("steps", "SELECT step, samples, seconds, loss FROM steps ORDER BY step")
    if not rows:
        return {"losses": {name: [] for name in ("step", "samples", "seconds", "loss", "low", "high")}}
    table = np.array([[math.nan if value is None else value for value in row] for row in rows], np.float64)
    step, loss = table[:, 0] + 1, table[:, 3]
    sums = np.cumsum(np.nan_to_num(table[:, 1:3]), axis=0)
    seen = np.ones(len(step), bool)
    if first is not None:
        seen &= step >= first
    if last is not None:
        seen &= step <= last
    step, loss, sums = step[seen], loss[seen], sums[seen]
    ends = np.unique(np.linspace(0, len(step), min(points, len(step)) + 1).astype(int))
    parts = list(pairwise(ends))
    last_of = ends[1:] - 1
    return {
        "losses": {
            "step": listed(step[last_of]),
            "samples": listed(sums[last_of, 0]),
            "seconds": listed(sums[last_of, 1]),
            "loss": [_mean(loss[a:b]) for a, b in parts],
            "low": [_least(loss[a:b]) for a, b in parts],
            "high": [_least(-loss[a:b], -1.0) for a, b in parts],
        }
    }


def evaluations(run: Reading) -> Data:
    """By name: steps, and what evaluate() said, or the loss has logged."""
    found: dict[str, tuple[list[int], list[float | None]]] = {}
    for step, metric, value in run.metrics():
        steps, values = found.setdefault(words.line(str(metric)), ([], []))
        steps.append(step)
        values.append(value if value is not None and math.isfinite(value) else None)
    rows = run.rows("steps", "SELECT step, samples, seconds FROM steps ORDER BY step") if found else []
    table = np.array([[value or 0.0 for value in row] for row in rows], np.float64).reshape(-1, 3)
    sums = np.cumsum(table[:, 1:], axis=0) if len(table) else np.zeros((1, 2))
    known = table[:, 0] + 1 if len(table) else np.zeros(1)
    return {
        "evaluations": {
            name: {
                "step": steps,
                "samples": listed(np.interp(steps, known, sums[:, 0])),
                "seconds": listed(np.interp(steps, known, sums[:, 1])),
                "value": values,
            }
            for name, (steps, values) in found.items()
        }
    }


def series(run: Reading, points: int) -> Data:
    """Seconds since the first point; for each node its speed and memory, for all what they sent and how."""
    counts = {metric: _of(run, metric) for metric in COUNTED[:5]}
    grid = _grid(counts["batches"], points)
    if grid is None:
        return {"seconds": [], "nodes": {}, "pool": {}}
    by_node = {node: _rates(points_, grid) for node, points_ in counts["batches"].items()}
    loudest = sorted(by_node, key=lambda node: -float(by_node[node].sum()))
    nodes = {str(node): listed(by_node[node]) for node in loudest[:MOST_NODES]}
    if rest := loudest[MOST_NODES:]:
        nodes["others"] = listed(np.sum([by_node[node] for node in rest], axis=0))
    pool = {f"{metric}_per_s": _all(counts[metric], grid) for metric in COUNTED[:5]}
    sent = np.maximum(pool["bytes_sent_per_s"], 1e-9)
    ratio = np.where(pool["raw_bytes_per_s"] > 0, pool["raw_bytes_per_s"] / sent, np.nan)
    memory = _of(run, "rss_bytes")
    own = {metric: _own(run, metric, grid) for metric in OWN}
    return {
        "began_at": float(grid[0]),
        "seconds": listed(grid[1:] - grid[0]),
        "nodes": nodes,
        "memory": {str(node): _level(memory[node], grid) for node in loudest[:MOST_NODES] if node in memory},
        "pool": {name: listed(values) for name, values in pool.items()} | {"ratio": listed(ratio)} | own,
    }


def of_node(run: Reading, node: int, points: int) -> Data:
    """One node's history: speed, where its time went, bytes, memory; and what happened to it."""
    counts = {metric: _of(run, metric, node) for metric in (*COUNTED, "rss_bytes")}
    grid = _grid(counts["batches"], points)
    query = "SELECT at, kind, words FROM events WHERE node = ? ORDER BY rowid DESC LIMIT 100"
    told: list[list[Any]] = [
        [at, words.name(str(kind)), words.line(str(text)[:MOST_CHARS])]
        for at, kind, text in run.rows("events", query, node)
    ]
    query = "SELECT at, reason, detail FROM rejects WHERE node = ? ORDER BY rowid DESC LIMIT 100"
    refused = [
        [at, words.name(str(why)), words.line(str(text)[:MOST_CHARS])]
        for at, why, text in run.rows("rejects", query, node)
    ]
    if grid is None:
        return {"seconds": [], "rates": {}, "events": told, "rejects": refused}
    rates = {metric: listed(_rates(counts[metric].get(node), grid)) for metric in COUNTED}
    rates["rss_bytes"] = _level(counts["rss_bytes"].get(node, np.zeros((0, 2))), grid)
    return {"seconds": listed(grid[1:] - grid[0]), "rates": rates, "events": told, "rejects": refused}


def _of(run: Reading, metric: str, node: int | None = None) -> dict[int, Floats]:
    """By node: (points, 2) of when and what. A clock that was set back is taken to stand still."""
    condition, values = ("= ?", (metric, node)) if node is not None else ("IS NOT NULL", (metric,))
    query = f"SELECT node, at, value FROM samples WHERE metric = ? AND node {condition} ORDER BY rowid"
    found: dict[int, list[tuple[float, float]]] = {}
    for rows in run.many("samples", query, *values):
        for number, at, value in rows:
            found.setdefault(number, []).append((at or 0.0, value or 0.0))
    return {number: _forward(np.array(points, np.float64)) for number, points in found.items()}


def _forward(points: Floats) -> Floats:
    points[:, 0] = np.maximum.accumulate(points[:, 0])
    return points


def _grid(counted: dict[int, Floats], points: int) -> Floats | None:
    """Moments at which rates are told: at least a second apart."""
    times = [table[[0, -1], 0] for table in counted.values() if len(table)]
    began, ended = (float(np.min(times)), float(np.max(times))) if times else (0.0, 0.0)
    if ended - began < 1.0:
        return None
    return np.linspace(began, ended, int(min(points, max(1.0, ended - began))) + 1)


def _rates(table: Floats | None, grid: Floats) -> Floats:
    """In a second. A counter begins at 0, and stays where it is when its node has left."""
    if table is None or not len(table):
        return np.zeros(len(grid) - 1)
    value = np.interp(grid, table[:, 0], table[:, 1], left=0.0)
    rates: Floats = np.maximum(np.diff(value), 0.0) / np.diff(grid)
    return rates


def _all(counted: dict[int, Floats], grid: Floats) -> Floats:
    found: Floats = np.sum([_rates(table, grid) for table in counted.values()] or [np.zeros(len(grid) - 1)], axis=0)
    return found


def _level(table: Floats, grid: Floats) -> list[float | None]:
    """What it was then; nothing, while it was not there."""
    table = table[table[:, 1] > 0]
    if not len(table):
        return [None] * (len(grid) - 1)
    return listed(np.interp(grid[1:], table[:, 0], table[:, 1], left=np.nan, right=np.nan))


def _own(run: Reading, metric: str, grid: Floats) -> list[float | None]:
    """The pool's own, of which the largest of each moment is told."""
    rows = run.rows("samples", "SELECT at, value FROM samples WHERE metric = ? AND node IS NULL ORDER BY rowid", metric)
    table = np.array([[at or 0.0, value or 0.0] for at, value in rows], np.float64).reshape(-1, 2)
    found = np.full(len(grid) - 1, np.nan)
    place = np.clip(np.searchsorted(grid, table[:, 0]) - 1, 0, len(found) - 1)
    np.fmax.at(found, place, table[:, 1])
    return listed(found)


def listed(values: Floats) -> list[float | None]:
    """As JSON has it: what is not finite is nothing."""
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _mean(values: Floats) -> float | None:
    sound = values[np.isfinite(values)]
    return float(sound.mean()) if len(sound) else None


def _least(values: Floats, sign: float = 1.0) -> float | None:
    sound = values[np.isfinite(values)]
    return sign * float(sound.min()) if len(sound) else None
