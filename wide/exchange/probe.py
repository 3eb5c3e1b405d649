"""One short probe when a node joins: empty echoes tell the delay, loaded ones the bandwidth. Then traffic tells."""

from __future__ import annotations

from dataclasses import dataclass, field

from wide.telemetry.link import Link

PROBE_NBYTES = 64 * 1024
LOAD = memoryview(bytes(PROBE_NBYTES))
ECHOES = 4  # of each kind; on a busy machine only the quickest means anything
PATIENCE_S = 0.05  # a slow link is asked once


@dataclass(slots=True)
class Probing:
    """A conversation of echoes. `next_load` is what to say now; once it `is_over`, `link` is what was found."""

    sent_at: float = 0.0
    empty_s: list[float] = field(default_factory=list)
    loaded_s: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        return _is_enough(self.loaded_s)

    @property
    def link(self) -> Link:
        round_trip_s = min(self.empty_s)
        loaded_s = max(min(self.loaded_s) - round_trip_s, 1e-6)
        return Link(2 * PROBE_NBYTES / loaded_s, round_trip_s / 2, is_guess=True)  # the load went there and back

    def next_load(self, now: float) -> tuple[memoryview, ...]:
        self.sent_at = now
        return (LOAD,) if _is_enough(self.empty_s) and not self.is_over else ()

    def echoed(self, now: float) -> None:
        (self.loaded_s if _is_enough(self.empty_s) else self.empty_s).append(now - self.sent_at)


def _is_enough(echoes_s: list[float]) -> bool:
    return len(echoes_s) == ECHOES or sum(echoes_s) > PATIENCE_S
