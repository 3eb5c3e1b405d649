"""The lease timeline as a picture: one row for each node, time from left to right. Knows leases, and run.db's series.

Each column of pixels shows what part of that moment a node computed, encoded, sent and waited; nothing is left out,
however many leases there are. Where run.db has kept no leases, because the run is long, its series say it instead.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wide.dashboard.leases import PARTS, Floats, Leases
from wide.store.reading import Reading

COLUMNS = 1200
MOST_ROWS = 64
ROW_PIXELS, GAP_PIXELS = 14, 3
KINDS = {  # as they are shown, from the bottom of a row to its top; colours that can be told apart by everybody
    "compute": "#009e73",
    "encode": "#e69f00",
    "upload": "#0072b2",
    "decode": "#f0e442",
    "download": "#56b4e9",
    "wait": "#dcb3cb",
    "idle": "#bbbbbb",
    "refused": "#d55e00",
}
MEANINGS = {"wait": "wait for its turn, or for data", "idle": "idle: wait for the others", "refused": "did not count"}
IDLE, REFUSED = list(KINDS).index("idle") + 1, list(KINDS).index("refused") + 1
SERIES = """SELECT node, at, metric, value FROM samples
    WHERE node IS NOT NULL AND metric IN ('compute_s', 'codec_s', 'travel_s') ORDER BY rowid"""


class Timeline(NamedTuple):
    """A PNG, whose rows are these nodes, from one moment to another."""

    png: bytes
    nodes: list[int]
    began_at: float
    ended_at: float
    height: int
    left_out: int  # nodes for which there was no room

    @property
    def data_url(self) -> str:
        return "data:image/png;base64," + base64.b64encode(self.png).decode()


class Window(NamedTuple):
    """From one moment to another, in so many columns, for these nodes, in the order of their numbers."""

    began_at: float
    ended_at: float
    columns: int
    nodes: Sequence[int]

    @property
    def column_s(self) -> float:
        return (self.ended_at - self.began_at) / self.columns


def timeline(run: Reading) -> Timeline | None:
    """Of a whole run; None: there is nothing to see."""
    leases = Leases()
    leases.read(run)
    began_at, ended_at = leases.span
    if not leases.count:
        return None
    amounts = leases.amounts
    nodes = sorted(sorted(amounts, key=lambda node: -amounts[node])[:MOST_ROWS])
    window = Window(began_at, max(ended_at, began_at + 1e-3), COLUMNS, nodes)
    pixels = drawn(leases, window, run)
    return Timeline(png(pixels), nodes, began_at, window.ended_at, len(pixels), len(amounts) - len(nodes))


def drawn(leases: Leases, window: Window, run: Reading) -> npt.NDArray[np.uint8]:
    """(pixels, columns) of palette numbers: a row for each node, and a gap below it."""
    parts = _parts(leases, window)
    _fill_hole(run, leases, window, parts)
    times = np.linspace(window.began_at, window.ended_at, window.columns)
    query = "SELECT node, min(joined_at), max(coalesce(left_at, 1e18)) FROM nodes GROUP BY node"
    lives = {node: (joined, left) for node, joined, left in run.rows("nodes", query)}
    gap = np.zeros((GAP_PIXELS, window.columns), np.uint8)
    rows = [np.zeros((0, window.columns), np.uint8)]
    for i, node in enumerate(window.nodes):
        joined, left = lives.get(node, (-1e18, 1e18))
        rows += [_row(parts[i], (times >= joined - 1) & (times <= left + 1)), gap]
    return np.concatenate(rows)


def _parts(leases: Leases, window: Window) -> Floats:
    """(nodes, kinds, columns): which part of each column's time was spent how."""
    shape = (len(window.nodes), window.columns + 1)
    ramps, lost = np.zeros((len(PARTS) + 1, *shape)), np.zeros((2, *shape))
    nodes = np.asarray(window.nodes, np.int64)
    for chunk in leases.seen_between(window.began_at, window.ended_at) if len(nodes) else ():
        place = np.clip(np.searchsorted(nodes, chunk.rows["node"]), 0, len(nodes) - 1)
        mine = nodes[place] == chunk.rows["node"]
        which, refused = place[mine], chunk.rows["refused"][mine] > 0
        at = np.clip((chunk.stations[mine] - window.began_at) / window.column_s, 0, window.columns)
        for i in range(len(ramps)):
            ramps[i] += _ramp(which, at[:, i], window)
        for i, station in enumerate((0, -1)):
            lost[i] += _ramp(which[refused], at[refused, station], window)
    parts = np.zeros((len(nodes), len(KINDS), window.columns))
    for i, name in enumerate(PARTS):
        parts[:, list(KINDS).index(name)] = _covered(ramps[i], ramps[i + 1])
    parts[:, REFUSED - 1] = _covered(*lost)
    return parts


def _ramp(which: npt.NDArray[Any], at: Floats, window: Window) -> Floats:
    """(nodes, edges): at each column's edge, the sum over all moments in `at` of how far it is past them."""
    edges, size = window.columns + 1, len(window.nodes) * (window.columns + 1)
    cell = which * edges + np.minimum(at.astype(np.int64), window.columns)
    count = np.bincount(cell, minlength=size).reshape(-1, edges)
    total = np.bincount(cell, at, minlength=size).reshape(-1, edges)
    before = np.concatenate([np.zeros((len(count), 1)), np.cumsum(count, axis=1)[:, :-1]], axis=1)
    passed = np.concatenate([np.zeros((len(total), 1)), np.cumsum(total, axis=1)[:, :-1]], axis=1)
    past: Floats = np.arange(edges) * before - passed
    return past


def _covered(start: Floats, end: Floats) -> Floats:
    """How much of each column these spans cover."""
    covered: Floats = np.clip(np.diff(start - end, axis=1), 0.0, 1.0)
    return covered


def _fill_hole(run: Reading, leases: Leases, window: Window, parts: Floats) -> None:
    """In a long run the leases between the first and the last ones are gone: what is known there is how each node spent
    its time, second by second.
    """
    hole = leases.hole
    if hole is None or hole[0] >= window.ended_at or hole[1] <= window.began_at:
        return
    first, last = (int(np.clip((at - window.began_at) / window.column_s, 0, window.columns)) for at in hole)
    edges = window.began_at + window.column_s * np.arange(window.columns + 1)
    series: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rows in run.many("samples", SERIES):
        for node, at, metric, value in rows:
            series.setdefault((node, metric), []).append((at, value))
    for i, node in enumerate(window.nodes):
        for kind, metric in (("compute", "compute_s"), ("encode", "codec_s"), ("upload", "travel_s")):
            if len(points := series.get((node, metric), [])) > 1:
                at, value = np.array(points).T
                spent = np.clip(np.diff(np.interp(edges, at, value)) / window.column_s, 0.0, 1.0)
                parts[i, list(KINDS).index(kind), first:last] = spent[first:last]


def _row(parts: Floats, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """(ROW_PIXELS, columns) of palette numbers: computing at the bottom, then the others, idle above; 0: nothing."""
    columns = parts.shape[1]
    heights = np.cumsum(parts[: IDLE - 1], axis=0)
    levels = np.minimum(np.round(heights * ROW_PIXELS), ROW_PIXELS).astype(int)
    pixels = np.full((ROW_PIXELS, columns), IDLE, np.uint8)
    pixels[:, ~present] = 0
    up = np.arange(ROW_PIXELS)[::-1, None]  # 0 is the row's bottom
    for kind in range(IDLE - 1, 0, -1):
        pixels = np.where(up < levels[kind - 1], np.uint8(kind), pixels)
    pixels[0:2, parts[REFUSED - 1] > 0] = REFUSED
    return pixels


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """With a palette; number 0 is transparent."""
    height, width = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = b"\0\0\0" + b"".join(bytes.fromhex(colour[1:]) for colour in KINDS.values())
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    parts = chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"tRNS", b"\0")
    return b"\x89PNG\r\n\x1a\n" + parts + chunk(b"IDAT", zlib.compress(lines, 1)) + chunk(b"IEND", b"")
