"""How an update came about: what its node's watch says, and when it was here. Plain numbers."""

from __future__ import annotations

from typing import NamedTuple


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
        sent_s = max(0.0, self.here_at - granted_at)
        encoded_s = min(max(0.0, self.came_at - granted_at), sent_s)
        computed_s = max(0.0, encoded_s - self.codec_s)
        received_s = max(0.0, computed_s - self.compute_s)
        merged_s = max(sent_s, merged_at - granted_at)
        received, computed, encoded, sent, merged = (
            round(1e6 * seconds) for seconds in (received_s, computed_s, encoded_s, sent_s, merged_s)
        )
        return received, computed, encoded, sent, merged
