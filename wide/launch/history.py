"""A run's numbers, step by step, for Python: a table, and a picture of it. Knows run.db; pandas only if it is there."""

from __future__ import annotations

import html
import importlib.util
import math
from pathlib import Path
from typing import Any

from wide.dashboard.curves import losses, metrics_of
from wide.dashboard.svg import plot
from wide.store.reading import Reading

STEPS = "SELECT step, epoch, samples, loss, seconds, merged_at FROM steps WHERE step < ? ORDER BY step"
EVALUATIONS = "SELECT step, metric, value FROM evaluations WHERE step <= ? ORDER BY rowid"
LOGGED = "SELECT step + 1, metric, value FROM logged WHERE step < ? ORDER BY rowid"
ALL = 2**62


class Picture:
    """Shows itself in a notebook; elsewhere, `save` writes it to a file."""

    def __init__(self, html: str) -> None:
        self.html = html

    def __repr__(self) -> str:
        return "<Picture: a notebook shows it; elsewhere .save('loss.html')>"

    def _repr_html_(self) -> str:
        return self.html

    def save(self, file: Path | str) -> None:
        Path(file).write_text(f'<!doctype html><meta charset="utf-8">{self.html}\n', encoding="utf-8")


def history(folder: Path, steps: int = ALL) -> Any:
    """One row for each step, counted from 1 as on the screen: step, epoch, samples, loss, seconds, at, what the loss
    has logged in it, and what evaluate() said after it. A DataFrame if pandas is there, else a list of dicts.
    """
    with Reading(folder) as run:
        rows = {
            step: {
                "step": step + 1,
                "epoch": epoch + 1,
                "samples": samples,
                "loss": _number(loss),
                "seconds": seconds,
                "at": at,
            }
            for step, epoch, samples, loss, seconds, at in run.rows("steps", STEPS, steps)
        }
        for step, metric, value in [*run.rows("logged", LOGGED, steps), *run.rows("evaluations", EVALUATIONS, steps)]:
            if step - 1 in rows:  # after so many steps
                rows[step - 1][metric] = _number(value)
    table = list(rows.values())
    if importlib.util.find_spec("pandas") is None:
        return table
    import pandas

    return pandas.DataFrame(table)


def picture(folder: Path) -> Picture:
    """Losses and metrics over steps."""
    with Reading(folder) as run:
        plots = [plot("loss", [losses(run, "loss")], "step", width=520, height=200)]
        plots += [plot(name, [curve], "step", width=520, height=200) for name, curve in metrics_of(run).items()]
    return Picture("".join(f'<div style="display:inline-block">{drawn}</div>' for drawn in plots))


def shown(summary: str, folder: Path) -> str:
    """A result in a notebook's cell."""
    return f"<div>{html.escape(summary)}</div>{picture(folder).html}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value
