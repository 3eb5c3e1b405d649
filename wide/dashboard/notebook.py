"""A run in a notebook's cell: a picture that is drawn anew while it trains. Knows IPython, where it runs already."""

from __future__ import annotations

import contextlib
import html
import sys
import time
from typing import Any, Self

from wide.dashboard.progress import line
from wide.dashboard.svg import Curve, plot
from wide.telemetry.snapshot import Snapshot

EVERY_S = 1.0


class Cell:
    """The output of the cell that called `wide.run`; log lines go to its stderr, above."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._shown_at = 0.0
        self._last: tuple[Snapshot, tuple[str, float]] | None = None

    def __enter__(self) -> Self:
        from IPython.display import HTML, display

        self._handle = display(HTML(""), display_id=True)
        return self

    def __exit__(self, *_: object) -> None:
        """What was seen last stays."""
        if self._last is not None:
            self._update(picture(*self._last, time.monotonic()))

    def show(self, run: Snapshot, phase: tuple[str, float]) -> None:
        now = time.monotonic()
        self._last = run, phase
        if now - self._shown_at >= EVERY_S:
            self._shown_at = now
            self._update(picture(run, phase, now))

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def _update(self, text: str) -> None:
        from IPython.display import HTML

        if self._handle is not None:
            with contextlib.suppress(Exception):  # a cell that is gone is no reason to end a run
                self._handle.update(HTML(text))


def picture(run: Snapshot, phase: tuple[str, float], now: float) -> str:
    """The line of words, how far it is, its losses, and what is in the way."""
    words = f"<div>{html.escape(line(run, phase, now))}</div>"
    if run.started_at is None or not run.step:
        return words
    done = run.step / run.steps if run.steps else 0.0
    bar = f'<progress value="{done:.4f}" max="1" style="width:100%"></progress>' if run.steps else ""
    points = len(run.losses)
    steps = [(i + 1) * run.step / points for i in range(points)]
    losses = plot("loss", [Curve("loss", steps, list(run.losses))], "step", width=560, height=150)
    return (
        f'<div style="max-width:600px">{words}{bar}{losses}<div><small>{html.escape(run.verdict)}</small></div></div>'
    )
