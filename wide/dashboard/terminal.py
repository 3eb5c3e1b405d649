"""The progress line, while stderr is a terminal. Its own thread reads the numbers; nobody waits for it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from wide.telemetry.log import log
from wide.telemetry.snapshot import Snapshot, Window

REFRESH_S = 0.25


@contextlib.contextmanager
def watching(window: Window, is_wanted: bool) -> Iterator[None]:
    """Show the line while the block runs. Log lines pass above it."""
    if not is_wanted or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(stderr=True)
    stop = threading.Event()
    with Live(console=console, auto_refresh=False, transient=True) as live:
        handlers = [h for h in log.handlers if isinstance(h, logging.StreamHandler) and h.stream is sys.__stderr__]
        for handler in handlers:
            handler.setStream(sys.stderr)  # rich has put its own here, which writes above the line

        def show() -> None:
            while not stop.wait(REFRESH_S):
                live.update(
                    Text(line(window.latest, time.monotonic()), no_wrap=True, overflow="ellipsis"), refresh=True
                )

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            for handler in handlers:
                handler.setStream(sys.__stderr__)


def line(run: Snapshot, now: float) -> str:
    """`step 12/40 · epoch 3 · loss 0.231 · 512 batches/s · 4 nodes · 3 s left · accuracy 0.97`"""
    if run.started_at is None or run.step == 0:
        return f"{len(run.nodes)} nodes, waiting for the first update"
    elapsed = max(now - run.started_at, 1e-9)
    of = f"/{run.steps}" if run.steps is not None else ""
    parts = [f"step {run.step}{of}", f"epoch {run.epoch + 1}", f"loss {run.loss:.4g}"]
    parts += [f"{(run.batches - run.before[1]) / elapsed:.0f} batches/s", f"{len(run.nodes)} nodes"]
    left = time_left(run, elapsed)
    if left is not None:
        parts.append(f"{left:.0f} s left" if left < 120 else f"{left / 60:.0f} min left")
    return " · ".join(parts + [f"{name} {value:.4g}" for name, value in run.metrics.items()])


def time_left(run: Snapshot, elapsed_s: float) -> float | None:
    """By the steps still to do or by the clock, whichever ends first."""
    limits = []
    if run.steps is not None:
        limits.append((run.steps - run.step) * elapsed_s / max(1, run.step - run.before[0]))
    if run.seconds is not None:
        limits.append(run.seconds - elapsed_s)
    return max(0.0, min(limits)) if limits else None
