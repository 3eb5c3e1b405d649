"""Updates on their way in: where their bytes go, how parts become one update, and what that says about the link.

Knows peers and tensors; decides nothing about leases. What a peer may not send is refused before there is room for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from wide.codec.ladder import RAW
from wide.codec.layout import Flat, scale
from wide.codec.pieces import MOST_PART_NBYTES, cut, decode
from wide.coordinator.choices import Choices
from wide.coordinator.master import Master
from wide.coordinator.peer import Arriving, Peer
from wide.coordinator.probe import PROBE_NBYTES
from wide.errors import ProtocolError
from wide.telemetry.log import log
from wide.wire import messages as say
from wide.wire.frames import Destinations

MOST_S = 1e9  # thirty years; sums of them stay finite


class Intake:
    """Receives payloads for the master."""

    def __init__(self, master: Master, choices: Choices, idle_s: Callable[[], float]) -> None:
        self.master, self.choices = master, choices
        self._idle_s = idle_s  # how long the loop has waited for something to do, all in all
        self._live_nbytes = master.layout.live_nbytes
        self._pieces = cut(master.layout, only_live=True)
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

    def echoed(self, peer: Peer, send: Callable[..., None]) -> None:
        """A probe was said back."""
        if peer.probing is None or peer.probing.is_over:
            raise ProtocolError("out of order", "an echo of nothing")
        peer.probing.echoed(time.monotonic())
        if peer.probing.is_over:
            peer.up, peer.down = peer.probing.link, peer.probing.link  # two links, each with its own future
            log.debug("node %d: %.2g ms away, %s", peer.node, 1000 * peer.up.delay_s, peer.up.words)
        peer.probing.next(send)

    def update(self, peer: Peer, update: say.Update) -> Flat | None:
        """The update's numbers, if they are all here; None: they follow in parts."""
        if not peer.arriving:
            raise ProtocolError("out of order", "an update in one breath with a hello")
        if update.codec != RAW:
            peer.arriving[0].flat = self.master.take_buffer()
            return None
        flat = peer.incoming.popleft()
        assert isinstance(flat, Flat)
        self._arrived(peer, update)
        return flat

    def part(self, peer: Peer) -> tuple[say.Update, Flat] | None:
        """One more part is here; if it was the last one, the update is whole."""
        arriving = peer.arriving[0] if peer.arriving else None
        data = peer.incoming.popleft() if peer.incoming else None
        if arriving is None or arriving.flat is None or not isinstance(data, bytearray):
            raise ProtocolError("out of order", "a part of nothing")
        decode(self._pieces[arriving.parts], arriving.update.codec, memoryview(data), arriving.flat.raw)
        arriving.parts += 1
        arriving.nbytes += len(data)
        if arriving.parts < len(self._pieces):
            return None
        flat, arriving.flat = arriving.flat, None
        self._arrived(peer, arriving.update)
        return arriving.update, flat

    def debt(self, peer: Peer, weight: float) -> None:
        """What a leaving node's codec still owed, if it handed that in, goes to the master, as its updates would have.
        Not if its last update did not count and it has not heard of that: then it owes something else.
        """
        flat = peer.incoming.popleft() if peer.incoming else None
        if not isinstance(flat, Flat):
            return
        if peer.refused or not flat.is_finite():
            self.master.release(flat)
        else:
            scale(flat, weight)
            self.master.settle(flat)

    def _may_owe(self, peer: Peer) -> bool:
        return peer.is_working and not self.choices.is_lossless

    def forget(self, peer: Peer) -> None:
        """The peer is gone: what had come of its update is of no use."""
        for arriving in peer.arriving:
            if arriving.flat is not None:
                self.master.release(arriving.flat)
        for payload in peer.incoming:
            if isinstance(payload, Flat):
                self.master.release(payload)
        peer.incoming.clear()
        peer.arriving.clear()

    def _place_for_update(self, peer: Peer, update: say.Update, nbytes: int) -> Destinations:
        if not peer.is_working or len(peer.arriving) >= max(1, len(peer.sent)):
            raise ProtocolError("out of order", "an update that nobody waits for")
        sent = peer.sent.get(update.lease)
        if len(peer.sent) < 2 and (peer.pending or peer.connection.has_unsent):
            raise ProtocolError("out of order", "an update for work that was not read")
        if not all(0 <= time_s < MOST_S for time_s in _times(update)):
            raise ProtocolError("bad numbers", "an update whose times are no times")
        asked = sent.codec if sent is not None else RAW
        if update.codec != asked:
            raise ProtocolError("unknown codec", f"an update in {update.codec!r}, asked for was {asked}")
        if nbytes != (self._live_nbytes if update.codec == RAW else 0):
            raise ProtocolError("wrong payload", f"an update with {nbytes} bytes of payload")
        peer.arriving.append(Arriving(update, time.monotonic(), self._idle_s(), peer.connection.bytes_received))
        return self._flat(peer) if update.codec == RAW else ()

    def _place_for_part(self, peer: Peer, nbytes: int) -> Destinations:
        arriving = peer.arriving[-1] if peer.arriving else None
        if arriving is None or arriving.update.codec == RAW or arriving.announced == len(self._pieces):
            raise ProtocolError("out of order", "a part of nothing")
        if nbytes > MOST_PART_NBYTES:
            raise ProtocolError("payload too long", f"a part of {nbytes} bytes")
        arriving.announced += 1
        data = bytearray(nbytes)
        peer.incoming.append(data)
        return (memoryview(data),)

    def _flat(self, peer: Peer) -> Destinations:
        flat = self.master.take_buffer()
        peer.incoming.append(flat)
        return (flat.bytes,)

    def _arrived(self, peer: Peer, update: say.Update) -> None:
        arriving = peer.arriving.popleft()
        assert peer.up is not None
        assert peer.down is not None
        if update.codec != RAW:
            peer.saved_nbytes += self._live_nbytes - arriving.nbytes
        nbytes = peer.connection.bytes_received - arriving.nbytes_before
        if nbytes:  # it did not come in one read
            encoding_s = self.choices.busy_s(self.choices.update_role, peer, update.codec, self._live_nbytes)
            elapsed_s = time.monotonic() - arriving.since
            busy_s = elapsed_s - (self._idle_s() - arriving.idle_before_s)  # and could not receive
            peer.up.observe(nbytes, elapsed_s, max(encoding_s, busy_s))
        if update.received_nbytes > 0:
            busy_s = self.choices.busy_s("weights", peer, peer.codecs["weights"], self._live_nbytes)
            peer.down.observe(update.received_nbytes, update.received_s, max(busy_s, update.distracted_s))
        if update.speeds is not None:
            self.choices.heard_speeds(peer, update.speeds)


def _times(update: say.Update) -> tuple[float, ...]:
    return update.compute_s, update.codec_s, update.network_s, update.received_s, update.distracted_s
