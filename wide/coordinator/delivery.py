"""Work on its way out: which weights a node needs, in which form, and the data of its batches. Knows peers and tensors.

What is raw goes with the message, in one system call; what is encoded follows in parts, each as soon as it is ready.
"""

from __future__ import annotations

import numpy as np

from wide.codec.batch import Packed
from wide.codec.encoders import Encoders, done
from wide.codec.ladder import LOSSLESS, RAW, codec_named
from wide.codec.lossless import Planes
from wide.codec.pieces import PIECE_NBYTES
from wide.coordinator.choices import Choices
from wide.coordinator.events import GrantLease
from wide.coordinator.feed import Feed
from wide.coordinator.peer import Peer, Sent
from wide.coordinator.switchboard import Switchboard
from wide.coordinator.versions import Encoded, Parts, Versions
from wide.wire import messages as say

PART = say.Part()


class Delivery:
    """Sends `Work`."""

    def __init__(
        self, versions: Versions, feed: Feed, choices: Choices, encoders: Encoders, board: Switchboard
    ) -> None:
        self.versions, self.feed, self.choices = versions, feed, choices
        self._encoders, self._board = encoders, board
        self.batch_nbytes = 0  # of the last lease whose batches were streamed

    def deliver(self, peer: Peer, grant: GrantLease, version: int, strategy: str) -> None:
        stretches = self.feed.schedule.stretches(*grant.block)
        payload: list[memoryview] = []
        if self.versions.newest < 0:
            self._open(version)  # a node may have built it by itself; the next one is compared with it
        codecs, parts, is_whole = self._weights(peer, version, payload) if peer.version != version else ([], [], False)
        weights_nbytes = sum(map(len, payload))
        packed: list[Packed] = []
        batches_codec = RAW
        if peer.has_data:
            payload += self.feed.ids(stretches)
        else:
            packed = self.feed.batches(stretches)
            batches_codec = self._batches(peer, packed, payload, parts)
        sizes = [size for stretch in stretches for size in self.feed.schedule.sizes(*stretch)]
        sent = peer.sent[grant.lease] = Sent(sizes, peer.codecs[self.choices.update_role])
        work = say.Work(
            lease=grant.lease,
            version=version,
            stretches=[(step.number, first, end - first, step.samples) for step, first, end in stretches],
            sizes=sent.sizes,
            weights_nbytes=weights_nbytes,
            batches=None if peer.has_data else [batch.description for batch in packed],
            weights_codecs=codecs,
            is_whole=is_whole,
            batches_codec=batches_codec,
            runs=[(batch.nbytes, batch.width) for batch in packed],
            reply_codec=sent.codec,
            refused=peer.refused,
            wants_speeds=peer.wants_speeds,
            strategy=strategy,
            group=grant.group,
        )
        peer.refused, peer.wants_speeds = 0, ()
        if not peer.pending:
            self._board.send(peer, work, *payload)
        else:
            peer.pending.append((work, done(payload)))  # behind the parts of the work before
        peer.pending.extend((PART, part) for part in parts)
        for part in parts:
            if not part.done():
                part.add_done_callback(lambda _: self._board.bell.ring())
        self.pump(peer)

    def pump(self, peer: Peer) -> None:
        """Send what is ready, in its order."""
        while peer.pending and peer.pending[0][1].done():
            message, payload = peer.pending.popleft()
            self._board.send(peer, message, *payload.result())

    def _weights(self, peer: Peer, version: int, payload: list[memoryview]) -> tuple[list[str], Parts, bool]:
        """Raw ones join the payload; encoded ones are returned: codecs, parts, and whether they are all of it."""
        if version != self.versions.newest:
            self._open(version)
        is_first, codec = peer.version < 0, peer.codecs["weights"]
        path = self.versions.since(peer.version) if codec != RAW and peer.keeps_versions else []
        peer.version = version
        if codec == RAW:
            peer.sending.add(version)
            payload.append(self.versions.raw(only_live=not is_first))
            return [], [], False
        is_whole = not path
        if is_whole:
            path = [self.versions.whole(codec if codec in LOSSLESS else "zstd", only_live=not is_first)]
            peer.keeps_versions = True
        return [step.codec for step in path], _all_parts(path), is_whole

    def _open(self, version: int) -> None:
        if "weights" in self.choices.wants_sample and (sample := self.versions.sample()) is not None:
            self.choices.try_on("weights", *sample)
        self.versions.open(version, self.choices.for_differences(self._board.members), self._in_flight)

    def _in_flight(self) -> set[int]:
        for peer in self._board.members:
            if not peer.wants_write and not peer.pending:
                peer.sending.clear()
        return set().union(*(peer.sending for peer in self._board.members))

    def _batches(self, peer: Peer, packed: list[Packed], payload: list[memoryview], parts: Parts) -> str:
        """The batches' bytes as they are, or encoded. Returns how."""
        self.batch_nbytes = sum(batch.nbytes for batch in packed)
        if "batch" in self.choices.wants_sample:
            sample = _joined(packed[0])
            self.choices.try_on("batch", sample, packed[0].width, np.empty(0, np.float32))
        codec = codec_named(name) if (name := peer.codecs["batch"]) != RAW else None
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
