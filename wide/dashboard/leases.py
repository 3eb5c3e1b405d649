"""How each lease of a run went, from run.db to arrays: all of them, or what has come since the last look.

Two watches never quite agree, and a clock may be set back: what cannot be is moved to where it can.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wide.store.reading import Reading
from wide.telemetry.journey import BEFORE, FIELDS
from wide.wire import words

NEW, OLD = np.dtype(list(FIELDS)), np.dtype(list(BEFORE))
MOST_NBYTES = 256 << 20  # in one row, unpacked
MOST_CHUNK, MOST = 50_000, 1_100_000
NEWER = "SELECT rowid, at, leases, words, data FROM leases WHERE rowid > ? ORDER BY rowid"
BACK_S = 2.0  # a clock that goes back by more than this was set back
PARTS = ("wait", "download", "decode", "compute", "encode", "upload")  # of a lease, in their order

Floats = npt.NDArray[np.float64]


class Chunk(NamedTuple):
    """Some leases: (leases,) `rows` as they were written, with words of the whole run; (leases, 7) `stations`: when by
    the wall's clock it was granted, and when each part of it was over.
    """

    rows: npt.NDArray[Any]
    stations: Floats
    began_at: float
    ended_at: float


class Leases:
    """Of one run. `words` are codecs and reasons, by number."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.words: list[str] = [""]
        self.amounts: Counter[int] = Counter()  # of leases, by node
        self._numbers: dict[str, int] = {"": 0}
        self._row = 0
        self._identity: float | None = None
        self._hole: tuple[int, tuple[float, float] | None] = (0, None)  # as of that row
        self._written_at, self._shift_s = float("-inf"), 0.0

    def read(self, run: Reading) -> None:
        """What is new."""
        (last,) = (run.rows("leases", "SELECT max(rowid) FROM leases") or [(0,)])[0]
        if (last or 0) < self._row or run.identity != self._identity:
            self.__init__()  # type: ignore[misc]  # another run is there now
        self._identity = run.identity
        found: list[npt.NDArray[Any]] = []
        count = 0
        for many in run.many("leases", NEWER, self._row):
            for self._row, at, leases, known, data in many:
                rows = _unpacked(data, leases)
                if len(rows):
                    found.append(self._at_home(rows, at, known))
                    count += len(rows)
                if count >= MOST_CHUNK:
                    self._add(found)
                    found, count = [], 0
        if found:
            self._add(found)

    @property
    def count(self) -> int:
        return sum(len(chunk.rows) for chunk in self.chunks)

    @property
    def span(self) -> tuple[float, float]:
        """From the first grant to the last update; the same twice, if there is none."""
        if not self.chunks:
            return 0.0, 0.0
        return min(chunk.began_at for chunk in self.chunks), max(chunk.ended_at for chunk in self.chunks)

    @property
    def hole(self) -> tuple[float, float] | None:
        """Of a long run, the leases between the first and the last ones are not kept: from when to when."""
        if self._hole[0] != self._row:
            self._hole = self._row, self._find_hole()
        return self._hole[1]

    def _find_hole(self) -> tuple[float, float] | None:
        began_at, ended_at = self.span
        grants = np.sort(np.concatenate([np.zeros(0), *(chunk.stations[:, 0] for chunk in self.chunks)]))
        gaps = np.diff(grants)
        if not len(gaps) or (widest := int(gaps.argmax())) < 1 or gaps[widest] < (ended_at - began_at) / 20:
            return None
        return float(grants[widest]), float(grants[widest + 1])

    def seen_between(self, start: float, end: float) -> Iterator[Chunk]:
        """Those of which something happened in that time."""
        for chunk in self.chunks:
            if chunk.began_at >= end or chunk.ended_at <= start:
                continue
            seen = (chunk.stations[:, 0] < end) & (chunk.stations[:, -1] > start)
            yield chunk if seen.all() else chunk._replace(rows=chunk.rows[seen], stations=chunk.stations[seen])

    def few_between(self, start: float, end: float, most: int) -> tuple[npt.NDArray[Any], Floats] | None:
        """The same, all in one: rows and stations. None: they are more than so many."""
        rows, stations, count = [np.zeros(0, NEW)], [np.zeros((0, len(PARTS) + 1))], 0
        for chunk in self.seen_between(start, end):
            count += len(chunk.rows)
            if count > most:
                return None
            rows.append(chunk.rows)
            stations.append(chunk.stations)
        return np.concatenate(rows), np.concatenate(stations)

    def _at_home(self, rows: npt.NDArray[Any], at: Any, known: str) -> npt.NDArray[Any]:
        """With the run's words, and its clock."""
        names = _names(known)
        numbers = np.array([self._number(name) for name in names], np.uint8)
        for field in ("codec", "refused"):
            rows[field] = numbers[np.minimum(rows[field], len(numbers) - 1)]
        if isinstance(at, float):
            if at < self._written_at - BACK_S:
                self._shift_s += self._written_at - at
            self._written_at = at
        rows["granted_at"] += self._shift_s
        self.amounts.update(rows["node"].tolist())
        return rows

    def _add(self, found: list[npt.NDArray[Any]]) -> None:
        if self.chunks and len(self.chunks[-1].rows) < MOST_CHUNK // 2:
            found = [self.chunks.pop().rows, *found]
        rows = np.concatenate(found)
        stations = _stations(rows)
        sound = np.isfinite(stations).all(axis=1)
        rows, stations = rows[sound], stations[sound]
        if not len(rows):
            return
        began, ended = float(stations[:, 0].min()), float(stations[:, -1].max())
        self.chunks.append(Chunk(rows, stations, began, ended))
        while self.count > MOST and len(self.chunks) > 2:
            del self.chunks[1]  # as run.db, which keeps the first ones and the last

    def _number(self, name: str) -> int:
        """A byte has room for 255 of them; what comes later has no name."""
        if name not in self._numbers and len(self.words) < 256:
            self._numbers[name] = len(self.words)
            self.words.append(name)
        return self._numbers.get(name, 0)


def _unpacked(data: Any, count: Any) -> npt.NDArray[Any]:
    """Nothing, if they are damaged: the others can still be seen."""
    try:
        plain = zlib.decompressobj().decompress(data, MOST_NBYTES)
    except (zlib.error, TypeError):
        return np.zeros(0, NEW)
    if not isinstance(count, int):
        return np.zeros(0, NEW)
    if len(plain) == count * NEW.itemsize:
        return np.frombuffer(bytearray(plain), NEW)
    rows = np.zeros(len(plain) // OLD.itemsize if len(plain) == count * OLD.itemsize else 0, NEW)
    rows["loss"] = np.nan
    for name in OLD.names or ():
        rows[name] = np.frombuffer(plain, OLD, len(rows))[name]
    return rows


def _names(known: Any) -> list[str]:
    try:
        found = json.loads(known)
        return [words.line(str(name)) for name in found] or [""]
    except (ValueError, TypeError):
        return [""]


def _stations(rows: npt.NDArray[Any]) -> Floats:
    """Told backwards from when it was here: its node's watch says how long each part took."""
    rows = rows.copy()
    for name in ("here_s", "came_s", "codec_s", "decode_s", "compute_s", "received_s"):
        rows[name] = np.where(np.isfinite(rows[name]), rows[name], np.nan)
    here = np.maximum(rows["here_s"].astype(np.float64), 0.0)
    encoded = np.clip(rows["came_s"], 0.0, here)
    computed = np.maximum(encoded - np.maximum(rows["codec_s"] - rows["decode_s"], 0.0), 0.0)
    decoded = np.maximum(computed - rows["compute_s"], 0.0)
    received = np.maximum(decoded - rows["decode_s"], 0.0)
    asked = np.maximum(received - rows["received_s"], 0.0)
    granted: Floats = rows["granted_at"].astype(np.float64)
    later = (asked, received, decoded, computed, encoded, here)
    found: Floats = np.stack([granted, *(granted + seconds for seconds in later)], axis=1)
    return found
