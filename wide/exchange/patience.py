"""How long a peer may take: to say hello, to finish what it began to say, to read what it is sent, to say anything.
Knows counts of bytes and a clock's readings.
"""

from __future__ import annotations

from dataclasses import dataclass

from wide.errors import Absent, WideError
from wide.wire.messages import BEAT_S

GREETING_S = 10.0
VISIT_S = 120.0  # who is let in but only asks; its answer may be large, and its link slow
STALL_S = 30.0  # without a single byte, in the middle of something; or
BATCHES = 4  # so many of its batches, between which it looks at its connection
SILENT_S = 3 * BEAT_S  # a node beats while it computes, too: others may take its work
GONE_S = 60.0  # and it is not waited for any more


@dataclass(slots=True)
class Patience:
    """Since when nothing has moved, been heard, been said. `look` takes note of it; questions only answer."""

    received: int = 0
    sent: int = 0
    moved_at: float = 0.0  # or was in nobody's way
    heard_at: float = 0.0
    said_at: float = 0.0
    is_speaking: bool = False  # something has begun that is not whole yet
    is_silent: bool = False  # and was told to be so

    def look(self, received: int, sent: int, is_speaking: bool, has_unsent: bool, now: float) -> None:
        """Called now and then: the bytes that were received and sent, all in all."""
        is_moving = received != self.received or sent != self.sent
        if is_moving or not (is_speaking or has_unsent):
            self.moved_at = now
        if received != self.received:
            self.received, self.heard_at = received, now
        if sent != self.sent:
            self.sent, self.said_at = sent, now
        self.is_speaking = is_speaking

    def exhausted(self, is_ready: bool, batches_per_s: float, now: float) -> WideError | None:
        """Why there is no more waiting for a peer that has said hello, if so."""
        limit_s = max(STALL_S, BATCHES / batches_per_s) if batches_per_s > 0 else STALL_S
        if now - self.moved_at >= limit_s:
            what = "stopped in the middle of a message" if self.is_speaking else "does not read what it is sent"
            return Absent("stalled", f"{what}, for {limit_s:g} s")
        if is_ready and now - self.heard_at > GONE_S:
            return Absent("silent", f"said nothing for {GONE_S:g} s")
        return None

    def has_fallen_silent(self, now: float) -> bool:
        return now - self.heard_at > SILENT_S

    def owes_a_beat(self, now: float) -> bool:
        """Whoever waits for work should know that we are still there."""
        return now - self.said_at > BEAT_S
