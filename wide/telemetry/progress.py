"""The few numbers that a person watches. Written by whoever trains, read by whoever shows them, without a lock."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Progress:
    """Where a run is."""

    steps: int | None = None  # how many there will be, if that is known
    seconds: float | None = None  # the time limit, if there is one
    step: int = 0
    epoch: int = 0
    batches: int = 0  # and how many steps and batches were done before this process
    before: tuple[int, int] = (0, 0)
    loss: float = float("nan")
    nodes: int = 0
    started_at: float | None = None  # time.monotonic() of the first lease
    metrics: dict[str, float] = field(default_factory=dict)
