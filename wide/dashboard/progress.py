"""A run in one line of words. Knows a snapshot."""

from __future__ import annotations

from wide.telemetry.snapshot import Snapshot

NOT_FINITE = "not finite"


def line(run: Snapshot, phase: tuple[str, float], now: float) -> str:
    """`step 12/40 · epoch 3 · loss 0.231 · 512 batches/s · 4 nodes · 3 s left · accuracy 0.97`; before training begins,
    what is being done and since when.
    """
    nodes = counted(sum(not node.is_silent for node in run.nodes), "node")
    doing, since = phase
    if run.started_at is None or run.step == 0:
        since_s = f" ({now - since:.0f} s)" if since else ""
        return f"{doing}{since_s}" if doing else f"{nodes}, waiting for the first update"
    of = f"/{run.steps}" if run.steps is not None else ""
    speed = f"{rate(run.batches_per_s)} batches/s"
    parts = [f"step {run.step}{of}", f"epoch {run.epoch + 1}", f"loss {number(run.loss)}", speed, nodes]
    if run.left_s is not None:
        parts.append(f"{duration(run.left_s)} left")
    return " · ".join(parts + [f"{name} {number(value)}" for name, value in run.metrics.items()])


def number(value: float | None) -> str:
    return NOT_FINITE if value is None or value != value else f"{value:.4g}"


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def counted(count: int, thing: str) -> str:
    return f"{count} {thing}{'' if count == 1 else 's'}"
