"""Memory for weights and updates, shared with the nodes on this machine if that is possible. Knows no peers."""

from __future__ import annotations

import hmac

from wide.codec.memory import Memory, Private
from wide.telemetry.log import log
from wide.transport.shared import IS_POSSIBLE, Segment, Sharing

SMALLEST_NBYTES = 32 << 10  # less is sent sooner than room for it is found (docs/findings.md)


class Common:
    """What is smaller than `smallest` is not worth sharing."""

    def __init__(self, is_wanted: bool = True, smallest: int = SMALLEST_NBYTES) -> None:
        self._smallest = smallest
        self._sharing: Sharing | None = None
        if is_wanted and IS_POSSIBLE:
            try:
                self._sharing = Sharing()
            except OSError as error:
                self._give_up(error)

    def greeting(self, nbytes: int) -> tuple[int, int, int] | None:
        """Where a node should look, if updates are so large; None: they are sent."""
        return self._sharing.greeting if self._sharing is not None and nbytes >= self._smallest else None

    def is_seen_by(self, proof: str) -> bool:
        """Has somebody who says this looked into the memory that it was told of?"""
        return self._sharing is not None and hmac.compare_digest(proof.encode(), self._sharing.proof.encode())

    def allocate(self, nbytes: int) -> Memory:
        if self._sharing is None or nbytes < self._smallest:
            return Private(nbytes)
        try:
            return Segment(nbytes)
        except OSError as error:
            self._give_up(error)
            return Private(nbytes)

    def close(self) -> None:
        if self._sharing is not None:
            self._sharing.close()

    def _give_up(self, error: OSError) -> None:
        self.close()
        self._sharing = None
        log.warning("no memory can be shared with nodes on this machine (%s): they are sent everything", error.strerror)
