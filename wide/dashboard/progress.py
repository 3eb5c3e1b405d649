"""A run in one line of words. Knows a snapshot, and what was to be seen a few seconds before."""

from __future__ import annotations

from collections import deque

from wide.telemetry.snapshot import Snapshot, Window

RECENT_S = 10.0  # speed and time left are those of the last seconds


class Progress:
    """`see` what is in the window, often; `line` says it."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._seen: deque[tuple[float, int, int]] = deque()  # when, steps, batches

    def see(self) -> None:
        run = self._window.latest
        if run.started_at is None or (self._seen and self._seen[-1][0] >= run.at):
            return
        self._seen.append((run.at, run.step, run.batches))
        while len(self._seen) > 2 and self._seen[1][0] <= run.at - RECENT_S:
            self._seen.popleft()

    def line(self, now: float) -> str:
        """`step 12/40 · epoch 3 · loss 0.231 · 512 batches/s · 4 nodes · 3 s left · accuracy 0.97`"""
        run, (phase, since) = self._window.latest, self._window.phase
        nodes = counted(sum(not node.is_silent for node in run.nodes), "node")
        if run.started_at is None or run.step == 0:
            return f"{phase} ({now - since:.0f} s)" if phase else f"{nodes}, waiting for the first update"
        steps_per_s, batches_per_s = self._rates(now)
        of = f"/{run.steps}" if run.steps is not None else ""
        speed = f"{batches_per_s:.0f}" if batches_per_s >= 10 else f"{batches_per_s:.2g}"
        parts = [f"step {run.step}{of}", f"epoch {run.epoch + 1}", f"loss {run.loss:.4g}", f"{speed} batches/s", nodes]
        if (left_s := time_left(run, steps_per_s, now)) is not None:
            parts.append(f"{duration(left_s)} left")
        return " · ".join(parts + [f"{name} {value:.4g}" for name, value in run.metrics.items()])

    def _rates(self, now: float) -> tuple[float, float]:
        """Steps and batches in a second. Where nothing happens any more, they fall."""
        if len(self._seen) < 2:
            run = self._window.latest
            elapsed_s = max(run.elapsed_s, 1e-9)
            return (run.step - run.before[0]) / elapsed_s, (run.batches - run.before[1]) / elapsed_s
        (began, step, batches), (_, last_step, last_batches) = self._seen[0], self._seen[-1]
        elapsed_s = max(now - began, 1e-9)
        return (last_step - step) / elapsed_s, (last_batches - batches) / elapsed_s


def time_left(run: Snapshot, steps_per_s: float, now: float) -> float | None:
    """By the steps still to do or by the clock, whichever ends first."""
    limits = []
    if run.steps is not None and steps_per_s > 0:
        limits.append((run.steps - run.step) / steps_per_s)
    if run.seconds is not None and run.started_at is not None:
        limits.append(run.seconds - (now - run.started_at))
    return max(0.0, min(limits)) if limits else None


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
