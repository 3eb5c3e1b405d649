"""The lease timeline as a picture: one row for each node, time from left to right. Knows run.db's leases and series.

Each column of pixels shows what part of that moment a node computed, encoded, sent and waited; nothing is left out,
however many leases there are. Where run.db has kept no leases, because the run is long, its series say it instead.
"""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wide.store.reading import Reading
from wide.telemetry.journey import FIELDS

COLUMNS = 1200
MOST_ROWS = 64
ROW_PIXELS, GAP_PIXELS = 14, 3
KINDS = ("compute", "encode", "send", "receive, or wait for its turn", "wait for the others", "refused")
PALETTE = ("#009e73", "#e69f00", "#0072b2", "#56b4e9", "#bbbbbb", "#d55e00")
COMPUTE, ENCODE, SEND, RECEIVE, IDLE, REFUSED = range(1, 7)
MOST_NBYTES = 256 << 20  # in one row, unpacked
SERIES = """SELECT node, at, metric, value FROM samples
    WHERE node IS NOT NULL AND metric IN ('compute_s', 'codec_s', 'travel_s') ORDER BY rowid"""

Floats = npt.NDArray[np.float64]


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


def timeline(run: Reading) -> Timeline | None:
    """None: there is nothing to see."""
    leases = _leases(run)
    lives = run.rows("nodes", "SELECT node, min(joined_at), max(coalesce(left_at, 1e18)) FROM nodes GROUP BY node")
    if leases is None or not lives:
        return None
    began_at = float(leases[:, 1].min())
    ended_at = max(float((leases[:, 1] + leases[:, 5]).max()), began_at + 1e-3)
    amounts = dict(zip(*np.unique(leases[:, 0].astype(int), return_counts=True), strict=True))
    nodes = sorted(sorted(amounts, key=lambda node: -amounts[node])[:MOST_ROWS])
    parts = _parts(leases, nodes, began_at, ended_at)
    _fill_hole(run, leases, nodes, began_at, ended_at, parts)
    times = np.linspace(began_at, ended_at, COLUMNS)
    present = {node: (times >= joined - 1) & (times <= left + 1) for node, joined, left in lives}
    rows = [_row(parts[i], present.get(int(node), np.ones(COLUMNS, bool))) for i, node in enumerate(nodes)]
    gap = np.zeros((GAP_PIXELS, COLUMNS), np.uint8)
    pixels = np.concatenate([part for row in rows for part in (row, gap)])
    return Timeline(_png(pixels), [int(n) for n in nodes], began_at, ended_at, len(pixels), len(amounts) - len(nodes))


def _leases(run: Reading) -> Floats | None:
    """(leases, 7): node, granted_at, then seconds after that, and whether it was refused."""
    kind = np.dtype(list(FIELDS))
    found = []
    for (data,) in run.rows("leases", "SELECT data FROM leases ORDER BY rowid"):
        try:
            plain = zlib.decompressobj().decompress(data, MOST_NBYTES)
        except (zlib.error, TypeError):
            continue  # damaged: the others can still be seen
        rows = np.frombuffer(plain[: len(plain) // kind.itemsize * kind.itemsize], kind)
        found.append(_stations(rows))
    leases = np.concatenate(found) if found else np.zeros((0, 7))
    sound = np.isfinite(leases).all(axis=1)
    return leases[sound] if sound.any() else None


def _stations(rows: npt.NDArray[Any]) -> Floats:
    """When its node had all it needed, had computed and had encoded, and when it was here, in seconds after the grant.
    Two watches never quite agree: what cannot be is moved to where it can.
    """
    here = np.maximum(rows["here_s"], 0.0)
    encoded = np.clip(rows["came_s"], 0.0, here)
    computed = np.maximum(encoded - rows["codec_s"], 0.0)
    received = np.maximum(computed - rows["compute_s"], 0.0)
    columns = (rows["node"], rows["granted_at"], received, computed, encoded, here, rows["refused"])
    found: Floats = np.stack([column.astype(np.float64) for column in columns], axis=1)
    return found


def _parts(leases: Floats, nodes: list[Any], began_at: float, ended_at: float) -> Floats:
    """(nodes, kinds, columns): which part of each column's time was spent how."""
    parts = np.zeros((len(nodes), 6, COLUMNS))
    width_s = (ended_at - began_at) / COLUMNS
    rows = np.asarray(nodes, dtype=np.float64)
    which = np.clip(np.searchsorted(rows, leases[:, 0]), 0, len(rows) - 1)
    which = np.where(rows[which] == leases[:, 0], which, -1)
    granted = (leases[:, 1] - began_at) / width_s
    stations = [granted, *(granted + leases[:, i] / width_s for i in range(2, 6))]
    spans = ((RECEIVE, 0, 1), (COMPUTE, 1, 2), (ENCODE, 2, 3), (SEND, 3, 4))
    for i in range(len(nodes)):
        mine = which == i
        for kind, start, end in spans:
            parts[i, kind - 1] = _coverage(stations[start][mine], stations[end][mine])
        lost = mine & (leases[:, 6] > 0)
        parts[i, REFUSED - 1] = _coverage(stations[1][lost], stations[2][lost])
    return parts


def _coverage(start: Floats, end: Floats) -> Floats:
    """How much of each column these spans cover, in columns."""
    start, end = np.clip(start, 0, COLUMNS), np.clip(end, 0, COLUMNS)
    edges = np.arange(COLUMNS + 1, dtype=np.float64)

    def before(at: Floats) -> Floats:
        """At each edge, the sum over all moments in `at` of how far it is past them."""
        at = np.sort(at)
        count = np.searchsorted(at, edges)
        past: Floats = edges * count - np.concatenate([[0.0], np.cumsum(at)])[count]
        return past

    covered: Floats = np.clip(np.diff(before(start) - before(end)), 0.0, 1.0)
    return covered


def _fill_hole(run: Reading, leases: Floats, nodes: list[Any], began_at: float, ended_at: float, parts: Floats) -> None:
    """In a long run the leases between the first and the last ones are gone: what is known there is how each node spent
    its time, second by second.
    """
    granted = leases[:, 1]
    gaps = np.diff(granted)
    if not len(gaps) or (widest := int(gaps.argmax())) < 1 or gaps[widest] < (ended_at - began_at) / 20:
        return
    width_s = (ended_at - began_at) / COLUMNS
    first, last = (int((granted[i] - began_at) / width_s) for i in (widest, widest + 1))
    edges = began_at + width_s * np.arange(COLUMNS + 1)
    series: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rows in run.many("samples", SERIES):
        for node, at, metric, value in rows:
            series.setdefault((node, metric), []).append((at, value))
    for i, node in enumerate(nodes):
        for kind, metric in ((COMPUTE, "compute_s"), (ENCODE, "codec_s"), (SEND, "travel_s")):
            if len(points := series.get((int(node), metric), [])) > 1:
                at, value = np.array(points).T
                spent = np.clip(np.diff(np.interp(edges, at, value)) / width_s, 0.0, 1.0)
                parts[i, kind - 1, first:last] = spent[first:last]


def _row(parts: Floats, present: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """(ROW_PIXELS, COLUMNS) of palette numbers: computing at the bottom, then the others, idle above; 0: nothing."""
    order = (COMPUTE, ENCODE, SEND, RECEIVE)
    heights = np.cumsum([parts[kind - 1] for kind in order], axis=0)
    levels = np.minimum(np.round(heights * ROW_PIXELS), ROW_PIXELS).astype(int)
    pixels = np.full((ROW_PIXELS, COLUMNS), IDLE, np.uint8)
    pixels[:, ~present] = 0
    up = np.arange(ROW_PIXELS)[::-1, None]  # 0 is the row's bottom
    for kind, level in zip(reversed(order), levels[::-1], strict=True):
        pixels = np.where(up < level, np.uint8(kind), pixels)
    is_refused = parts[REFUSED - 1] > 0
    pixels[0:2, is_refused] = REFUSED
    return pixels


def _png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """With a palette; number 0 is transparent."""
    height, width = pixels.shape

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    palette = b"\0\0\0" + b"".join(bytes.fromhex(colour[1:]) for colour in PALETTE)
    lines = np.concatenate([np.zeros((height, 1), np.uint8), pixels], axis=1).tobytes()
    parts = chunk(b"IHDR", head) + chunk(b"PLTE", palette) + chunk(b"tRNS", b"\0")
    return b"\x89PNG\r\n\x1a\n" + parts + chunk(b"IDAT", zlib.compress(lines, 6)) + chunk(b"IEND", b"")
