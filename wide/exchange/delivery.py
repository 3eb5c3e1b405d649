"""Work on its way out: which weights a node needs, in which form, and the data of its batches. Knows peers and tensors.

What is raw goes with the message, in one system call; what is encoded follows in parts, each as soon as it is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wide.codec.batch import Packed
from wide.codec.encoders import Encoders, done
from wide.codec.ladder import LOSSLESS, RAW, codec_named
from wide.codec.layout import Flat
from wide.codec.lossless import Planes
from wide.codec.memory import Name
from wide.codec.pieces import PIECE_NBYTES
from wide.codec.spare import Spare
from wide.exchange.feed import Feed
from wide.exchange.link_codecs import LinkCodecs
from wide.exchange.peer import NEVER, OLD, Peer, Sent
from wide.exchange.switchboard import Switchboard
from wide.exchange.versions import Encoded, Parts, Versions
from wide.telemetry.log import log
from wide.wire import messages as say

PART = say.Part()


class Assignment(NamedTuple):
    """A lease for a node: the batches first…end-1 of the run, with these weights, to be computed in this way, on this
    core (-1: on any).
    """

    lease: int
    first: int
    end: int
    group: int
    version: int
    strategy: str
    core: int = -1
    is_check: bool = False  # the update is to come as it is
    rates: Sequence[float] = ()


class Bundle(NamedTuple):
    """A version on its way to a node: raw in the payload, encoded in parts, or where it lies in our memory. Empty, if
    the node has it.
    """

    payload: list[memoryview]
    codecs: list[str]
    parts: Parts
    is_whole: bool
    at: Name | None


NOTHING = Bundle([], [], [], False, None)


class Delivery:
    """Sends `Work`, and weights to those who have work already."""

    def __init__(
        self,
        versions: Versions,
        feed: Feed,
        codecs: LinkCodecs,
        encoders: Encoders,
        board: Switchboard,
        spare: Spare,
    ) -> None:
        self.versions, self._feed, self._codecs = versions, feed, codecs
        self._encoders, self._board, self._spare = encoders, board, spare
        self._is_read_in_place = False  # by nodes on this machine: nobody is at a version when the next one is made
        self._version = 0  # that is made
        self._waiting: dict[Peer, None] = {}  # those who have work for the next one
        self.batch_nbytes = 0  # of the last lease whose batches were streamed

    def has_built(self, peer: Peer, version: int, keeps_versions: bool) -> None:
        """The peer has built these weights by itself."""
        peer.outgoing.version, peer.outgoing.keeps_versions = version, keeps_versions

    def begin_anew(self, overlaps: bool) -> None:
        """Updates are of another kind from now on, and nodes may be ahead of the weights: what they have is old."""
        self._is_read_in_place = not overlaps
        self.versions.forget()
        for peer in self._board.members:
            peer.outgoing.version = OLD

    def room_for_version(self, version: int) -> Callable[[], None] | None:
        """What makes the copy that will be sent, wherever it is called; None: none is needed."""
        if not self._is_read_in_place or all(peer.shares_memory for peer in self._board.members):
            return None  # where updates overlap, weights may be moved once more before they are sent
        return self.versions.reserve(version, self._in_flight())

    def deliver(self, peer: Peer, it: Assignment, is_ahead: bool = False) -> None:
        """`is_ahead`: its version is not made yet."""
        log.debug("node %d gets lease %d: batches %d…%d of the run", peer.node, it.lease, it.first, it.end - 1)
        outgoing, schedule = peer.outgoing, self._feed.schedule
        stretches = schedule.stretches(it.first, it.end)
        weights = NOTHING if is_ahead else self._weights(peer, it.version)
        payload, parts = [*weights.payload], [*weights.parts]
        weights_nbytes = sum(len(view) for view in payload)
        packed: list[Packed] = []
        batches_codec = RAW
        if peer.has_data:
            payload += self._feed.ids(stretches)
        else:
            packed = self._feed.batches(stretches)
            batches_codec = self._batches(peer, packed, payload, parts)
        sizes = [size for stretch in stretches for size in schedule.sizes(*stretch)]
        codec = peer.link.codecs[self._codecs.update_role]
        room = self._room(peer) if codec == RAW else None
        sent = outgoing.leases[it.lease] = Sent(sizes, codec, room, it.version if weights.at is not None else NEVER)
        work = say.Work(
            lease=it.lease,
            stretches=[(step.number, first, end - first, step.samples) for step, first, end in stretches],
            epochs=[step.epoch for step, _, _ in stretches] if stretches[-1].step.epoch else [],
            rates=list(it.rates),
            sizes=sent.sizes,
            weights_nbytes=weights_nbytes,
            batches=None if peer.has_data else [batch.description for batch in packed],
            weights_codecs=weights.codecs,
            is_whole=weights.is_whole,
            batches_codec=batches_codec,
            runs=[(batch.nbytes, batch.width) for batch in packed],
            reply_codec=sent.codec,
            refused=outgoing.refused,
            wants_speeds=self._codecs.take_wish(peer) if peer.link.wants_speeds else (),
            strategy=it.strategy,
            group=it.group,
            weights_at=weights.at,
            update_at=room.memory.name if room is not None else None,
            core=it.core,
            is_ahead=is_ahead,
        )
        outgoing.refused, outgoing.is_new = 0, False
        if is_ahead:
            outgoing.ahead, outgoing.awaits = it.lease, it.version
            self._waiting[peer] = None
        self._send(peer, work, payload, parts)

    def release(self, version: int) -> None:
        """This version is made: weights for whoever has work for it."""
        self._version = version
        for peer in list(self._waiting):
            self._begin(peer)

    def _begin(self, peer: Peer) -> None:
        """Who is at something else meanwhile hears of it when that is answered: new weights would get in its way."""
        outgoing = peer.outgoing
        if outgoing.is_at_work or outgoing.awaits > self._version:
            return
        del self._waiting[peer]
        it = self._weights(peer, self._version)
        nbytes = sum(len(view) for view in it.payload)
        weights = say.Weights(nbytes, it.codecs, it.is_whole, it.at, outgoing.refused)
        outgoing.ahead = outgoing.refused = 0
        self._send(peer, weights, it.payload, it.parts)

    def to_evaluate(self, peer: Peer, message: say.Evaluate, weights: memoryview) -> None:
        """What never changes goes along the first time."""
        others, peer.outgoing.is_new = [self.versions.unchanging] if peer.outgoing.is_new else [], False
        self._board.send(peer, message, weights, *others)

    def refused(self, peer: Peer, lease: int) -> None:
        """The update for this lease did not count: its node hears of it with its next work, or the weights for that."""
        peer.outgoing.refused = lease
        if peer in self._waiting:
            self._begin(peer)

    def answered(self, peer: Peer, lease: int) -> Sent | None:
        outgoing, sent = peer.outgoing, peer.outgoing.leases.pop(lease, None)
        outgoing.answered = lease if sent is not None else NEVER
        return sent

    def forget(self, peer: Peer) -> None:
        """What it may still write into is nobody else's any more."""
        self._waiting.pop(peer, None)
        peer.outgoing.pending.clear()
        for sent in peer.outgoing.leases.values():
            if sent.room is not None:
                self._spare.lose(sent.room)
        peer.outgoing.leases.clear()

    def pump(self, peer: Peer) -> None:
        """Send what is ready, in its order."""
        pending = peer.outgoing.pending
        while pending and pending[0][1].done():
            message, payload = pending.popleft()
            self._board.send(peer, message, *payload.result())

    def _send(self, peer: Peer, message: say.Work | say.Weights, payload: list[memoryview], parts: Parts) -> None:
        pending = peer.outgoing.pending
        if not pending:
            self._board.send(peer, message, *payload)
        else:
            pending.append((message, done(payload)))  # behind the parts of what was sent before
        if parts and not peer.is_closed:
            pending.extend((PART, part) for part in parts)
            for part in parts:
                if not part.done():
                    part.add_done_callback(lambda _: self._board.hub.ring())
            self.pump(peer)

    def _room(self, peer: Peer) -> Flat | None:
        """Where this machine's node can leave its update; None: it is sent."""
        if not peer.shares_memory:
            return None
        room = self._spare.take()
        if room.memory.name is None:  # there was no more memory to be shared
            self._spare.give(room)
            return None
        return room

    def _lay_out(self, peer: Peer, version: int) -> Name | None:
        """Where this machine's node finds the version; None: it is sent."""
        outgoing = peer.outgoing
        if not peer.shares_memory or peer.link.codecs["weights"] != RAW:
            return None
        name = self.versions.in_place
        if not self._is_read_in_place:
            if outgoing.is_new and not self.versions.has_all:
                return None  # copies have nothing of what is frozen
            if version != self.versions.newest:
                self._open(version)
            name = self.versions.name
        if name is not None:
            outgoing.version = version
        return name

    def _weights(self, peer: Peer, version: int) -> Bundle:
        """What brings this node to that version."""
        if self.versions.newest < 0 and not peer.shares_memory:
            self._open(version)  # a node may have built it by itself; the next one is compared with it
        if peer.outgoing.version == version:
            return NOTHING
        if (name := self._lay_out(peer, version)) is not None:
            return NOTHING._replace(at=name)
        if version != self.versions.newest:
            self._open(version)
        outgoing, codec = peer.outgoing, peer.link.codecs["weights"]
        is_first = outgoing.is_new
        may_differ = codec != RAW and outgoing.keeps_versions and not is_first
        path = self.versions.since(outgoing.version) if may_differ else []
        outgoing.version = version
        if codec == RAW:
            outgoing.sending.add(version)
            return NOTHING._replace(payload=self.versions.raw(only_live=not is_first))
        is_whole = not path
        if is_whole:
            path = [self.versions.whole(codec if codec in LOSSLESS else "zstd", only_live=not is_first)]
            outgoing.keeps_versions = True
        return Bundle([], [step.codec for step in path], _all_parts(path), is_whole, None)

    def _open(self, version: int) -> None:
        if "weights" in self._codecs.wants_sample and (sample := self.versions.sample()) is not None:
            self._codecs.try_on("weights", *sample)
        self.versions.open(version, self._codecs.for_differences(self._board.members), self._in_flight)

    def _in_flight(self) -> set[int]:
        in_flight: set[int] = set()
        for peer in self._board.members:
            outgoing = peer.outgoing
            in_flight |= {sent.reads for sent in outgoing.leases.values()}
            if not peer.wants_write and not outgoing.pending:
                outgoing.sending.clear()
            else:
                in_flight |= outgoing.sending
        return in_flight

    def _batches(self, peer: Peer, packed: list[Packed], payload: list[memoryview], parts: Parts) -> str:
        """The batches' bytes as they are, or encoded. Returns how."""
        self.batch_nbytes = sum(batch.nbytes for batch in packed)
        if "batch" in self._codecs.wants_sample:
            sample = _joined(packed[0])
            self._codecs.try_on("batch", sample, packed[0].width, np.empty(0, np.float32))
        codec = codec_named(name) if (name := peer.link.codecs["batch"]) != RAW else None
        if not isinstance(codec, Planes):
            payload += [buffer for batch in packed for buffer in batch.buffers]
            return RAW
        for batch in packed:
            raw = _joined(batch)
            for start in range(0, len(raw), PIECE_NBYTES):
                parts.append(self._encoders.submit(codec.encode, raw[start : start + PIECE_NBYTES], batch.width))
        return codec.name


def _all_parts(path: list[Encoded]) -> Parts:
    return [part for step in path for part in step.parts]


def _joined(batch: Packed) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.frombuffer(b"".join(batch.buffers), np.uint8)
