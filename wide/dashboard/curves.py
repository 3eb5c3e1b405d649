"""A run's curves: losses, metrics, speeds, memory, from the rows of run.db. Knows accounts; draws nothing."""

from __future__ import annotations

import math
from itertools import pairwise

from wide.dashboard.account import Account
from wide.dashboard.svg import Curve
from wide.store.reading import Reading
from wide.wire import words

MOST_NODES = 12  # with a curve of their own


def losses(reading: Reading, name: str, by_time: bool = False) -> Curve:
    rows = reading.rows("steps", "SELECT step, loss, seconds FROM steps ORDER BY step")
    spent, times = 0.0, []
    for _, _, seconds in rows:
        spent += seconds or 0.0
        times.append(spent)
    y = [math.nan if loss is None else loss for _, loss, _ in rows]
    return Curve(name, times if by_time else [step + 1 for step, _, _ in rows], y)


def metrics_of(reading: Reading) -> dict[str, Curve]:
    found: dict[str, list[tuple[float, float]]] = {}
    for step, metric, value in reading.metrics():
        found.setdefault(words.line(str(metric)), []).append((step, math.nan if value is None else value))
    return {name: Curve(name, [x for x, _ in points], [y for _, y in points]) for name, points in found.items()}


def _series(reading: Reading, metric: str) -> dict[int, list[tuple[float, float]]]:
    query = "SELECT node, at, value FROM samples WHERE metric = ? AND node IS NOT NULL ORDER BY rowid"
    found: dict[int, list[tuple[float, float]]] = {}
    for rows in reading.many("samples", query, metric):
        for node, at, value in rows:
            found.setdefault(node, []).append((at, value if value is not None else math.nan))
    return found


def speeds(run: Account, reading: Reading) -> list[Curve]:
    """Each node's, and that of all, from how many batches were merged by when."""
    series = _series(reading, "batches")
    grid = _grid(sorted(at for points in series.values() for at, _ in points))
    if not grid:
        return []
    times = [at - grid[0] for at in grid[1:]]
    curves, total = [], [0.0] * len(times)
    for node in _loudest(run, series):
        points = series[node]
        rates = [max(0.0, _at(points, b) - _at(points, a)) / (b - a) for a, b in pairwise(grid)]
        total = [before + now for before, now in zip(total, rates, strict=True)]
        curves.append(Curve(node_name(run, node), times, rates))
    return [*(curves[:MOST_NODES] if len(curves) > 1 else []), Curve("all nodes", times, total)]


def _grid(times: list[float]) -> list[float]:
    """Moments at which speeds are told: at most 300, at least a second apart."""
    if len(times) < 2 or times[-1] - times[0] < 1.0:
        return []
    count = int(min(300, max(1, times[-1] - times[0])))
    return [times[0] + i * (times[-1] - times[0]) / count for i in range(count + 1)]


def _at(points: list[tuple[float, float]], moment: float) -> float:
    """What had been counted by then, in between in proportion."""
    low, high = 0, len(points) - 1
    if moment <= points[0][0]:
        return points[0][1] if moment == points[0][0] else 0.0
    if moment >= points[-1][0]:
        return points[-1][1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if points[middle][0] <= moment else (low, middle)
    (a, before), (b, after) = points[low], points[high]
    return before + (after - before) * (moment - a) / (b - a) if b > a else after


def memories(run: Account, reading: Reading) -> list[Curve]:
    series = {node: [(at, y) for at, y in points if y] for node, points in _series(reading, "rss_bytes").items()}
    series = {node: points for node, points in series.items() if points}
    began = min((points[0][0] for points in series.values()), default=0.0)
    return [
        Curve(node_name(run, node), [at - began for at, _ in series[node]], [y / 1e6 for _, y in series[node]])
        for node in _loudest(run, series)[:MOST_NODES]
    ]


def _loudest(run: Account, series: dict[int, list[tuple[float, float]]]) -> list[int]:
    """Who did most comes first."""
    done = {node.totals.node: node.totals.batches for node in run.nodes}
    return sorted(series, key=lambda node: -done.get(node, 0))


def node_name(run: Account, number: int) -> str:
    return next((f"{number} {node.totals.name}" for node in run.nodes if node.totals.node == number), str(number))
