"""How long a peer may take: to say hello, to finish what it began to say, to read what it is sent. Knows a peer."""

from __future__ import annotations

from wide.coordinator.peer import Peer
from wide.errors import ProtocolError, Refused, WideError

GREETING_S = 10.0
STALL_S = 30.0  # without a single byte, in the middle of something; or
BATCHES = 4  # so many of its batches, between which it looks at its connection


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
    if now - peer.moved_at < limit_s:
        return None
    what = "stopped in the middle of a message" if is_speaking else "does not read what it is sent"
    return ProtocolError("stalled", f"{what}, for {limit_s:g} s")
