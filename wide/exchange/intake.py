"""Updates on their way in: where their bytes go, how parts become one update, and what its way says about the link.
Knows peers and tensors; decides nothing about leases.

What a peer may not send is refused before there is room for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from wide.codec.ladder import RAW
from wide.codec.layout import Flat, Layout
from wide.codec.pieces import MOST_PART_NBYTES, cut, decode
from wide.codec.spare import Spare
from wide.errors import ProtocolError
from wide.exchange.link_codecs import LinkCodecs
from wide.exchange.peer import Arriving, Peer
from wide.exchange.probe import PROBE_NBYTES
from wide.telemetry.journey import Journey
from wide.wire import messages as say
from wide.wire import words
from wide.wire.frames import Destinations

SPEED_MEMORY = 0.7
LEAST_S = 1e-6  # nobody computes anything in less


class Whole(NamedTuple):
    """An update of which everything is here, and how it came about."""

    update: say.Update
    flat: Flat
    journey: Journey


class Intake:
    """Receives payloads. `idle_s` tells how long the loop has waited for something to do, all in all."""

    def __init__(
        self, layout: Layout, spare: Spare, codecs: LinkCodecs, now: Callable[[], float], idle_s: Callable[[], float]
    ) -> None:
        self._spare, self._codecs, self._now, self._idle_s = spare, codecs, now, idle_s
        self._live_nbytes, self._clear_gaps = layout.live_nbytes, layout.clear_gaps
        self._all_touched, self._touched_nbytes = (1 << len(layout.trainable)) - 1, len(layout.trainable) // 8 + 1
        self._pieces = cut(layout, only_live=True)
        self._probe = memoryview(bytearray(PROBE_NBYTES))  # nobody looks at what comes back

    def place_for(self, peer: Peer, message: say.Message, nbytes: int) -> Destinations:
        if isinstance(message, say.Update):
            return self._place_for_update(peer, message, nbytes)
        if isinstance(message, say.Part):
            return self._place_for_part(peer, nbytes)
        if isinstance(message, say.Probe) and peer.probing is not None and nbytes == PROBE_NBYTES:
            return (self._probe,)
        if isinstance(message, say.Leaving) and self._may_owe(peer) and nbytes == self._live_nbytes:
            return self._flat(peer)
        if nbytes:
            raise ProtocolError("wrong payload", f"{type(message).__name__} with {nbytes} bytes of payload")
        return ()

    def update(self, peer: Peer, update: say.Update) -> Whole | None:
        """The update, if it is all here; None: it follows in parts."""
        incoming = peer.incoming
        if not incoming.arriving:
            raise ProtocolError("out of order", "an update in one breath with a hello")
        sent = peer.outgoing.leases.get(update.lease)
        if sent is not None and sent.room is not None:
            return self._whole(peer, update, sent.room)
        if update.codec != RAW:
            arriving = next(one for one in incoming.arriving if one.update is update)
            arriving.flat = self._spare.take()
            return None
        flat = incoming.payloads.popleft()
        assert isinstance(flat, Flat)
        return self._whole(peer, update, flat)

    def part(self, peer: Peer) -> Whole | None:
        """One more part is here; if it was the last one, the update is whole."""
        incoming = peer.incoming
        arriving = incoming.arriving[0] if incoming.arriving else None
        data = incoming.payloads.popleft() if incoming.payloads else None
        if arriving is None or arriving.flat is None or not isinstance(data, bytearray):
            raise ProtocolError("out of order", "a part of nothing")
        decode(self._pieces[arriving.parts], arriving.update.codec, memoryview(data), arriving.flat.raw)
        arriving.parts += 1
        arriving.nbytes += len(data)
        if arriving.parts < len(self._pieces):
            return None
        incoming.saved_nbytes += self._live_nbytes - arriving.nbytes
        flat, arriving.flat = arriving.flat, None
        return self._whole(peer, arriving.update, flat)

    def debt(self, peer: Peer) -> Flat | None:
        """What a leaving node's codec still owed, if it handed that in. Not if its last update did not count and it has
        not heard of that: then it owes something else.
        """
        flat = peer.incoming.payloads.popleft() if peer.incoming.payloads else None
        if not isinstance(flat, Flat):
            return None
        self._clear_gaps(flat.bytes)
        if peer.outgoing.refused or not flat.is_finite():
            self._spare.give(flat)
            return None
        return flat

    def forget(self, peer: Peer) -> None:
        """The peer is gone: what had come of its update is of no use."""
        incoming = peer.incoming
        begun = [*(arriving.flat for arriving in incoming.arriving), *incoming.payloads]
        for flat in begun:
            if isinstance(flat, Flat):
                self._clear_gaps(flat.bytes)
                self._spare.give(flat)
        incoming.payloads.clear()
        incoming.arriving.clear()

    def _may_owe(self, peer: Peer) -> bool:
        return peer.is_ready and not self._codecs.is_lossless

    def _place_for_update(self, peer: Peer, update: say.Update, nbytes: int) -> Destinations:
        outgoing, arriving = peer.outgoing, peer.incoming.arriving
        if not peer.is_ready or peer.is_evaluator or len(arriving) >= max(1, len(outgoing.leases)):
            raise ProtocolError("out of order", "an update that nobody waits for")
        if len(outgoing.leases) < 2 and (outgoing.pending or peer.connection.has_unsent):
            raise ProtocolError("out of order", "an update for work that was not read")
        if outgoing.ahead and update.lease == outgoing.ahead:
            raise ProtocolError("out of order", "an update for work that could not be begun")
        sent = outgoing.leases.get(update.lease)
        if sent is None and update.lease != outgoing.answered:  # what others took meanwhile is still among them
            raise ProtocolError("out of order", "an update for work that it was not given")
        asked = sent.codec if sent is not None else RAW
        if update.codec != asked:
            raise ProtocolError("unknown codec", f"an update in {update.codec[:20]!r}, asked for was {asked}")
        is_sent = update.codec == RAW and (sent is None or sent.room is None)
        if nbytes != (self._live_nbytes if is_sent else 0):
            raise ProtocolError("wrong payload", f"an update with {nbytes} bytes of payload")
        if sent is not None and not 0 < len(update.losses) <= len(sent.sizes):
            raise ProtocolError("bad numbers", f"{len(update.losses)} losses for {len(sent.sizes)} batches")
        if update.weights and len(update.weights) != len(update.losses):
            raise ProtocolError("bad numbers", f"{len(update.weights)} weights for {len(update.losses)} losses")
        if any(0 < weight < say.LEAST_WEIGHT for weight in update.weights):
            raise ProtocolError("bad numbers", f"a batch that weighs {min(filter(None, update.weights)):.3g}")
        if len(update.touched) != self._touched_nbytes:
            raise ProtocolError("bad numbers", f"{len(update.touched)} bytes say which tensors have a gradient")
        arriving.append(Arriving(update, self._now(), self._idle_s(), peer.connection.bytes_received))
        return self._flat(peer) if is_sent else ()

    def _place_for_part(self, peer: Peer, nbytes: int) -> Destinations:
        arriving = peer.incoming.arriving[-1] if peer.incoming.arriving else None
        if arriving is None or arriving.update.codec == RAW or arriving.announced == len(self._pieces):
            raise ProtocolError("out of order", "a part of nothing")
        if nbytes > MOST_PART_NBYTES:
            raise ProtocolError("payload too long", f"a part of {nbytes} bytes")
        arriving.announced += 1
        data = bytearray(nbytes)
        peer.incoming.payloads.append(data)
        return (memoryview(data),)

    def _flat(self, peer: Peer) -> Destinations:
        flat = self._spare.take()
        peer.incoming.payloads.append(flat)
        return (flat.bytes,)

    def _whole(self, peer: Peer, update: say.Update, flat: Flat) -> Whole:
        """All of an update is here."""
        incoming, traffic = peer.incoming, peer.traffic
        arriving, now = incoming.arriving.popleft(), self._now()
        if not peer.is_on_this_machine:
            elapsed_s = now - arriving.since
            traffic.travel_s += update.received_s + elapsed_s
            busy_s = elapsed_s - (self._idle_s() - arriving.idle_before_s)  # and could not receive
            nbytes = peer.connection.bytes_received - arriving.nbytes_before
            self._codecs.observe(peer, update, nbytes, elapsed_s, busy_s)
        compute_s, (batches, seconds) = max(update.compute_s, LEAST_S), incoming.computed
        incoming.computed = SPEED_MEMORY * batches + len(update.losses), SPEED_MEMORY * seconds + compute_s
        incoming.updates += 1
        traffic.compute_s += update.compute_s
        traffic.codec_s += update.codec_s
        traffic.network_s += update.network_s
        traffic.fetch_s += update.fetch_s
        traffic.rss_bytes = update.rss_bytes
        self._clear_gaps(flat.bytes)
        flat.touched = int.from_bytes(update.touched, "little") & self._all_touched
        flat.weights, flat.logged = update.weights, words.names(update.logged) if update.logged else {}
        spent = (update.codec, update.received_s, update.decode_s)
        return Whole(update, flat, Journey(update.compute_s, update.codec_s, arriving.since, now, *spent))
