"""Versions of the weights on their way to the nodes. Knows tensors and codecs; knows no peers, no pool.

A version is copied once, however many nodes it goes to, and does not change until its last byte has left. Where links
are slow it is also encoded once, as what turns the version before it into this one: a node that is behind by several
gets several.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import torch

from wide.codec.encoders import Encoders
from wide.codec.ladder import LOSSLESS, RAW
from wide.codec.layout import Flat, Layout
from wide.codec.lossless import Buffers
from wide.codec.lossy import Floats
from wide.codec.memory import Allocate, Memory, Name, Private
from wide.codec.pieces import Piece, cut, encode, floats
from wide.codec.planes import Bytes, difference
from wide.codec.shadow import publish

Parts = list[Future[Buffers]]
MOST_STEPS = 64
SAMPLE_NBYTES = 16 * 1024  # at each of
SAMPLES = 4  # places


@dataclass(slots=True)
class Encoded:
    """One version in parts, each ready when its future is."""

    codec: str
    parts: Parts
    base: int = -1  # the version that it is compared with, if so

    @property
    def nbytes(self) -> int:
        """Of what is ready."""
        return sum(len(buffer) for part in self.parts if part.done() for buffer in part.result())


class Versions:
    """The newest version, raw and encoded, and how to get there from older ones."""

    def __init__(self, weights: Flat, layout: Layout, encoders: Encoders, allocate: Allocate = Private) -> None:
        self.newest = -1
        self.live_nbytes = layout.live_nbytes
        self.has_all = layout.live_nbytes == layout.nbytes  # nothing is frozen
        self._weights, self._encoders, self._allocate = weights, encoders, allocate
        self.unchanging = weights.bytes[layout.live_nbytes :]  # of every version
        self._live, self._all = cut(layout, only_live=True), cut(layout, only_live=False)
        self._copies: dict[int, Memory] = {}
        self._reserved: tuple[int, Memory | None] = (-1, None)  # for a version that is being made
        self._reading: dict[int, Parts] = {}  # what is still being encoded from which copy
        self._steps: dict[int, Encoded] = {}  # by the version they lead to, each from the one before
        self._whole: dict[tuple[str, bool], Encoded] = {}  # the newest version, by codec and by how much of it

    def open(self, version: int, codec: str, in_flight: Callable[[], set[int]]) -> None:
        """The current weights are `version`; `codec` is for nodes that have the one before, "raw" if none wants that.

        `in_flight` names the versions that are still being sent as they are.
        """
        if self.newest in self._steps:
            wait(self._steps[self.newest].parts)  # it is what this one is compared with
        is_next = self.newest >= 0 and codec != RAW
        old = self._copies.get(self.newest) if is_next else None
        self._reading = {v: parts for v, parts in self._reading.items() if not all(part.done() for part in parts)}
        new = self._copy(version, in_flight() | self._reading.keys() | ({self.newest} if is_next else set()))
        self._whole.clear()
        if old is None:
            self._steps.clear()
        else:
            parts = self._encoders.begin(codec, lambda piece: publish(piece, codec, new.raw, old.raw), self._live)
            self._steps[version] = Encoded(codec, parts, self.newest)
            self._forget_detours()
        self.newest = version

    def forget(self) -> None:
        """The next version is compared with none before it."""
        self.newest = -1
        self._reserved = -1, self._reserved[1]  # what was copied may not be what it will be
        self._steps.clear()
        self._whole.clear()

    @property
    def in_place(self) -> Name | None:
        """Where the weights are made, frozen ones included."""
        return self._weights.memory.name

    @property
    def name(self) -> Name | None:
        """Where the newest version lies, for those who can see it; nothing frozen is there."""
        self._settle()
        return self._copies[self.newest].name

    def raw(self, only_live: bool) -> list[memoryview]:
        """The newest version as it is."""
        self._settle()
        live = self._copies[self.newest].bytes
        return [live] if only_live or self.has_all else [live, self.unchanging]

    def _settle(self) -> None:
        """If it was rounded on its way: until then it is not what the nodes will have."""
        if self.newest in self._steps and self._steps[self.newest].codec not in LOSSLESS:
            wait(self._steps[self.newest].parts)

    def since(self, version: int) -> list[Encoded]:
        """What leads from `version` to the newest; nothing, if it does not, or is longer than all of it."""
        path: list[Encoded] = []
        at = self.newest
        while at > version and at in self._steps:
            path.insert(0, self._steps[at])
            at = self._steps[at].base
        return path if at == version else []

    def whole(self, codec: str, only_live: bool) -> Encoded:
        """The newest version, encoded without anything to compare it with."""
        if (codec, only_live) not in self._whole:
            self._settle()
            copy, pieces = self._copies[self.newest].raw, self._live if only_live else self._all
            parts = self._encoders.begin(codec, lambda piece: encode(piece, codec, self._holding(piece, copy)), pieces)
            self._whole[codec, only_live] = Encoded(codec, parts)
            self._reading.setdefault(self.newest, []).extend(parts)
        return self._whole[codec, only_live]

    def _holding(self, piece: Piece, copy: torch.Tensor) -> torch.Tensor:
        """What is frozen was never copied."""
        return copy if piece.end <= self.live_nbytes else self._weights.raw

    def sample(self) -> tuple[Bytes, int, Floats] | None:
        """What changed since the newest version was opened, for trying codecs: the difference of the bit patterns, the
        bytes in a number, and the change as fp32.
        """
        pieces = [piece for piece in self._live if piece.may_lose and piece.dtype == self._live[0].dtype]
        if self.newest not in self._copies or not pieces:
            return None
        last = self._copies[self.newest].raw
        places = [
            slice(piece.start, min(piece.end, piece.start + SAMPLE_NBYTES))
            for piece in pieces[:: -(-len(pieces) // SAMPLES)]
        ]
        new, old = (torch.cat([raw[here] for here in places]) for raw in (self._weights.raw, last))
        change = new.view(pieces[0].dtype) - old.view(pieces[0].dtype)
        return difference(new.numpy(), old.numpy(), pieces[0].width), pieces[0].width, floats(change)

    def _forget_detours(self) -> None:
        """A way that is longer than all of a version is never taken."""
        nbytes = 0
        for i, version in enumerate(sorted(self._steps, reverse=True)[1:], start=1):
            nbytes += self._steps[version].nbytes
            if nbytes >= self.live_nbytes or i == MOST_STEPS:
                for useless in [v for v in self._steps if v <= version]:
                    del self._steps[useless]
                return

    def reserve(self, version: int, in_flight: set[int]) -> Callable[[], None]:
        """What copies the weights, when they are that version and before it is opened."""
        copy = self._reserved[1] or self._room(in_flight | self._reading.keys() | {self.newest})
        self._reserved = version, copy
        return lambda: self._fill(copy)

    def _copy(self, version: int, in_use: set[int]) -> Memory:
        reserved, copy = self._reserved
        if copy is None:
            copy = self._room(in_use)
        if reserved != version:
            self._fill(copy)
        self._reserved, self._copies[version] = (-1, None), copy
        return copy

    def _fill(self, copy: Memory) -> None:
        copy.raw.copy_(self._weights.raw[: self.live_nbytes])

    def _room(self, in_use: set[int]) -> Memory:
        """Memory of a copy that nobody sends from, or compares with, is used again."""
        free = [old for old in self._copies if old not in in_use]
        copy = self._copies.pop(free[0]) if free else self._allocate(self.live_nbytes)
        for old in free[1:]:
            self._copies.pop(old).close()
        return copy
