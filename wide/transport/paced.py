"""A stream that keeps below a rate, for whoever lends a machine and wants to use its network too. Knows streams and
time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from wide.transport.stream import Stream

BURST_S = 0.1  # what may be sent, or read, at once: so much of a second's worth
LEAST_NBYTES = 1500


class Pace:
    """One direction: how much may pass now, and how long until there is more."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._most = max(bytes_per_s * BURST_S, LEAST_NBYTES)
        self._left, self._at = self._most, time.monotonic()

    def allowance(self) -> int:
        now = time.monotonic()
        self._left = min(self._most, self._left + (now - self._at) * self._rate)
        self._at = now
        return int(self._left) if self._left >= min(LEAST_NBYTES, self._most) else 0

    def passed(self, nbytes: int) -> None:
        self._left -= nbytes

    @property
    def wait_s(self) -> float:
        return max(0.0, (min(LEAST_NBYTES, self._most) - self._left) / self._rate)


class Paced:
    """Each direction at most `bytes_per_s`. A stream that blocks waits; one that does not takes nothing for now."""

    def __init__(self, raw: Stream, bytes_per_s: float) -> None:
        self._raw = raw
        self._in, self._out = Pace(bytes_per_s), Pace(bytes_per_s)
        self._blocks = True
        self.binding = raw.binding

    @property
    def is_closed(self) -> bool:
        return self._raw.is_closed

    def fileno(self) -> int:
        number: int = self._raw.fileno()  # type: ignore[attr-defined]
        return number

    def has_input(self) -> bool:
        return self._in.allowance() > 0 and self._raw.has_input()

    def set_blocking(self, is_blocking: bool) -> None:
        self._blocks = is_blocking
        self._raw.set_blocking(is_blocking)

    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None:
        paces = [pace for pace, is_wanted in ((self._in, reading), (self._out, writing)) if is_wanted]
        if not any(pace.allowance() for pace in paces):
            _pause(min(pace.wait_s for pace in paces))
        self._raw.wait(reading, writing, timeout_s)

    def receive_into(self, view: memoryview) -> int:
        if not (allowed := self._allowed(self._in)):
            return 0
        nbytes = self._raw.receive_into(view[:allowed])
        self._in.passed(nbytes)
        return nbytes

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        if not (allowed := self._allowed(self._out)):
            return 0
        some: list[memoryview] = []
        for buffer in buffers:
            if allowed:
                some.append(memoryview(buffer)[:allowed])
                allowed -= len(some[-1])
        nbytes = self._raw.send(some)
        self._out.passed(nbytes)
        return nbytes

    def close(self) -> None:
        self._raw.close()

    def _allowed(self, pace: Pace) -> int:
        while not (allowed := pace.allowance()) and self._blocks:
            _pause(pace.wait_s)
        return allowed


def _pause(seconds: float) -> None:
    threading.Event().wait(seconds)
