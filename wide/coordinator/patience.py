"""How long a peer may take: to say hello, to finish what it began to say, to read what it is sent, to say anything.
Knows a peer.
"""

from __future__ import annotations

from wide.coordinator.peer import Peer
from wide.errors import Absent, Refused, WideError
from wide.wire.messages import BEAT_S

GREETING_S = 10.0
STALL_S = 30.0  # without a single byte, in the middle of something; or
BATCHES = 4  # so many of its batches, between which it looks at its connection
SILENT_S = 3 * BEAT_S  # a node beats while it computes, too: others may take its work
GONE_S = 60.0  # and it is not waited for any more


def exhausted(peer: Peer, now: float) -> WideError | None:
    """Why there is no more waiting for this peer, if so. Called now and then; remembers when bytes last moved."""
    if not peer.node:
        is_late = now - peer.connected_at > GREETING_S
        return Refused("you did not say hello in time") if is_late else None
    connection = peer.connection
    moved = connection.bytes_received + connection.bytes_sent
    is_speaking = connection.reader.is_amid_frame or bool(peer.arriving)
    if moved != peer.moved_nbytes or not (is_speaking or connection.has_unsent):
        peer.moved_nbytes, peer.moved_at = moved, now
    limit_s = STALL_S if not peer.batches_per_s else max(STALL_S, BATCHES / peer.batches_per_s)
    if now - peer.moved_at >= limit_s:
        what = "stopped in the middle of a message" if is_speaking else "does not read what it is sent"
        return Absent("stalled", f"{what}, for {limit_s:g} s")
    if peer.is_working and silence_s(peer, now) > GONE_S:
        return Absent("silent", f"said nothing for {GONE_S:g} s")
    return None


def silence_s(peer: Peer, now: float) -> float:
    """For how long nothing was heard of it; called now and then, so within a tick or two."""
    nbytes, at = peer.heard
    if nbytes != peer.connection.bytes_received:
        peer.heard = peer.connection.bytes_received, now
        return 0.0
    return now - at


def is_silent(peer: Peer, now: float) -> bool:
    return silence_s(peer, now) > SILENT_S


def owes_a_beat(peer: Peer, now: float) -> bool:
    """Who has work hears of us when it is done; who waits for some should know that we are still there."""
    nbytes, at = peer.said
    if nbytes != peer.connection.bytes_sent:
        peer.said = peer.connection.bytes_sent, now
        return False
    return now - at > BEAT_S and not peer.sent and not peer.pending and not peer.connection.has_unsent
