"""The progress line, while stderr is a terminal. Its own thread reads the numbers; nobody waits for it."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Iterator

from wide.telemetry.log import log
from wide.telemetry.progress import Progress

REFRESH_S = 0.25


@contextlib.contextmanager
def watching(progress: Progress, is_wanted: bool) -> Iterator[None]:
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
                live.update(Text(line(progress, time.monotonic()), no_wrap=True, overflow="ellipsis"), refresh=True)

        thread = threading.Thread(target=show, name="progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            for handler in handlers:
                handler.setStream(sys.__stderr__)


def line(progress: Progress, now: float) -> str:
    """`step 12/40 · epoch 3 · loss 0.231 · 512 batches/s · 4 nodes · 3 s left · accuracy 0.97`"""
    if progress.started_at is None or progress.step == 0:
        return f"{progress.nodes} nodes, waiting for the first update"
    elapsed = now - progress.started_at
    of = f"/{progress.steps}" if progress.steps is not None else ""
    parts = [f"step {progress.step}{of}", f"epoch {progress.epoch + 1}", f"loss {progress.loss:.4g}"]
    parts += [f"{(progress.batches - progress.before[1]) / elapsed:.0f} batches/s", f"{progress.nodes} nodes"]
    left = time_left(progress, elapsed)
    if left is not None:
        parts.append(f"{left:.0f} s left" if left < 120 else f"{left / 60:.0f} min left")
    return " · ".join(parts + [f"{name} {value:.4g}" for name, value in progress.metrics.items()])


def time_left(progress: Progress, elapsed_s: float) -> float | None:
    """By the steps still to do or by the clock, whichever ends first."""
    limits = []
    if progress.steps is not None:
        limits.append((progress.steps - progress.step) * elapsed_s / max(1, progress.step - progress.before[0]))
    if progress.seconds is not None:
        limits.append(progress.seconds - elapsed_s)
    return max(0.0, min(limits)) if limits else None
