"""How updates came about: what their nodes' watches say, and when they were here; and all of a run's in little room.
Plain numbers; on the way of every gradient.
"""

from __future__ import annotations

import json
import struct
from typing import NamedTuple

FIELDS = (  # of a lease in the logbook, as numpy calls them
    *(("lease", "<i8"), ("step", "<i8"), ("version", "<i8"), ("granted_at", "<f8")),
    *(("node", "<i4"), ("first_batch", "<i4"), ("batches", "<i4")),
    *(("received_us", "<u4"), ("computed_us", "<u4"), ("encoded_us", "<u4"), ("sent_us", "<u4"), ("merged_us", "<u4")),
    *(("codec", "u1"), ("refused", "u1")),
)
PACK = struct.Struct("<qqqdiii5IBB").pack
MOST_US = 2**32 - 1


class Journey(NamedTuple):
    """Computing, and encoding, took so long by its node's watch; its first bytes came, and all of it was here, when the
    clock of this process showed that.
    """

    compute_s: float
    codec_s: float
    came_at: float
    here_at: float
    codec: str = "raw"

    def stations(self, granted_at: float, merged_at: float) -> tuple[int, int, int, int, int]:
        """In millionths of a second after the grant: its node had all it needed, had computed, had encoded; it was
        here; it was merged. Two watches never quite agree: what cannot be is moved to where it can.
        """
        sent = int(1e6 * (self.here_at - granted_at))
        encoded = int(1e6 * (self.came_at - granted_at))
        merged = int(1e6 * (merged_at - granted_at))
        if not 0 <= encoded <= sent <= merged <= MOST_US:
            sent = min(max(sent, 0), MOST_US)
            encoded = min(max(encoded, 0), sent)
            merged = min(max(merged, sent), MOST_US)
        computed = max(0, encoded - int(1e6 * self.codec_s))
        return max(0, computed - int(1e6 * self.compute_s)), computed, encoded, sent, merged


class Place(NamedTuple):
    """What was leased: where it begins, and how many batches."""

    step: int
    first_batch: int
    batches: int


class Logbook:
    """Leases that were answered since the last time it was taken, one behind the other."""

    def __init__(self) -> None:
        self._data, self._count = bytearray(), 0
        self._words: dict[str, int] = {"": 0}  # codecs and reasons, by number

    def add(
        self,
        lease: int,
        node: int,
        place: Place,
        version: int,
        journey: Journey,
        granted_at: float,
        merged_at: float,
        wall_s: float,  # what the wall's clock is ahead
        refused: str = "",
    ) -> None:
        words = self._words
        codec, reason = words.setdefault(journey.codec, len(words)), words.setdefault(refused, len(words))
        stations = journey.stations(granted_at, merged_at)
        self._data += PACK(
            lease,
            place.step,
            version,
            granted_at + wall_s,
            node,
            place.first_batch,
            place.batches,
            *stations,
            codec,
            reason,
        )
        self._count += 1

    def take(self) -> tuple[int, str, bytes]:
        """How many, the words that they use, and all of them."""
        found = self._count, json.dumps(list(self._words)), bytes(self._data)
        self._data, self._count, self._words = bytearray(), 0, {"": 0}
        return found
