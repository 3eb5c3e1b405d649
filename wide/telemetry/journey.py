"""How updates came about: what their nodes' watches say, and when they were here; and all of a run's in little room.
Plain numbers, on the way of every gradient: they are only remembered; whoever reads them makes sense of them.
"""

from __future__ import annotations

import json
import math
import struct
from typing import NamedTuple

FIELDS = (  # of a lease in the logbook, as numpy calls them; seconds are counted from the grant, or say how long
    *(("lease", "<i8"), ("step", "<i8"), ("version", "<i8"), ("granted_at", "<f8")),
    *(("node", "<i4"), ("first_batch", "<i4"), ("batches", "<i4")),
    *(("came_s", "<f4"), ("here_s", "<f4"), ("merged_s", "<f4"), ("compute_s", "<f4"), ("codec_s", "<f4")),
    *(("codec", "u1"), ("refused", "u1"), ("received_s", "<f4"), ("decode_s", "<f4"), ("loss", "<f4")),
)
BEFORE = FIELDS[:-3]  # as an older version wrote them
PACK = struct.Struct("<qqqdiii5fBB3f").pack
LARGEST = 3.4e38  # that has room there


class Journey(NamedTuple):
    """Computing, and codecs, took so long by its node's watch; its first bytes came, and all of it was here, when the
    clock of this process showed that. Before that, the lease's own payload was received, and decoded, in so much time.
    """

    compute_s: float
    codec_s: float
    came_at: float
    here_at: float
    codec: str = "raw"
    received_s: float = 0.0
    decode_s: float = 0.0  # of codec_s


class Answer(NamedTuple):
    """To a lease: which one and whose, its first batch and how many, the version that it became part of (-1: none),
    when it was granted and merged, and what the wall's clock is ahead of ours.
    """

    lease: int
    node: int
    step: int
    first_batch: int
    batches: int
    version: int
    granted_at: float
    merged_at: float
    wall_s: float
    loss: float = math.nan  # the mean of its batches'


class Logbook:
    """Leases that were answered since the last time it was taken, one behind the other."""

    def __init__(self) -> None:
        self._data, self._count = bytearray(), 0
        self._words: dict[str, int] = {"": 0}  # codecs and reasons, by number

    def add(self, answer: Answer, journey: Journey, refused: str = "") -> None:
        lease, node, step, first, batches, version, granted_at, merged_at, wall_s, loss = answer
        compute_s, codec_s, came_at, here_at, codec, received_s, decode_s = journey
        words = self._words
        self._count += 1
        self._data += PACK(
            *(lease, step, version, granted_at + wall_s, node, first, batches),
            *(came_at - granted_at, here_at - granted_at, merged_at - granted_at, compute_s, codec_s),
            *(words.setdefault(codec, len(words)), words.setdefault(refused, len(words))),
            *(received_s, decode_s, loss if -LARGEST < loss < LARGEST else math.nan),
        )

    def take(self) -> tuple[int, str, bytes]:
        """How many, the words that they use, and all of them."""
        found = self._count, json.dumps(list(self._words)), bytes(self._data)
        self._data, self._count, self._words = bytearray(), 0, {"": 0}
        return found
