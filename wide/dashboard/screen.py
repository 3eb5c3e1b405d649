"""A run on a terminal's screen: progress, loss, nodes, what is in the way, what happened. Knows a snapshot and rich;
draws as much as there is room for, the most telling first.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wide.dashboard.progress import counted, duration, line, number, rate
from wide.telemetry.snapshot import Event, NodeView, Snapshot
from wide.wire import words

BARS = "▁▂▃▄▅▆▇█"
LEAST_EVENTS, ROOMY = 3, 20  # so many, if there are so many lines
NAME_CELLS, HOST_CELLS = 16, 16
LEAST_BAR, BAR_CELLS = 8, 100
WELL = "all is well"
WORRIES = {"left", "silent", "rejected"}


class Column(NamedTuple):
    """`rank`: those with the highest go first, if the screen is narrow."""

    title: str
    rank: int
    cell: Callable[[NodeView, Snapshot], str]
    is_text: bool = False


def _mbit(bytes_per_s: float) -> str:
    found = bytes_per_s * 8e-6
    return f"{found:.0f}" if found >= 10 else f"{found:.2g}"


def _memory(view: NodeView) -> str:
    nbytes = view.totals.rss_bytes
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def _codec(view: NodeView) -> str:
    codecs = view.link.codecs if view.link is not None else {}
    found = dict.fromkeys(codec for role, codec in codecs.items() if role != "batch" and codec != "raw")
    return "+".join(found) or ("–" if view.link is None or view.link.is_here else "raw")


def _up(view: NodeView) -> str:
    return "–" if view.link is None or view.link.is_here else _mbit(view.link.up_bytes_per_s)


def _down(view: NodeView) -> str:
    return "–" if view.link is None or view.link.is_here else _mbit(view.link.down_bytes_per_s)


COLUMNS = (
    Column("node", 0, lambda view, run: f"{view.totals.node} {_cut(view.totals.name, NAME_CELLS)}", is_text=True),
    Column("machine", 9, lambda view, run: _cut(view.host, HOST_CELLS), is_text=True),
    Column("state", 2, lambda view, run: view.state, is_text=True),
    Column("batch/s", 0, lambda view, run: rate(view.recent.batches_per_s)),
    Column("share", 1, lambda view, run: f"{view.totals.batches / max(1, run.batches):.0%}"),
    Column("up", 5, lambda view, run: _up(view)),
    Column("down", 5, lambda view, run: _down(view)),
    Column("codec", 7, lambda view, run: _codec(view), is_text=True),
    Column("comp", 3, lambda view, run: f"{view.recent.compute:.0%}"),
    Column("code", 6, lambda view, run: f"{view.recent.codec:.0%}"),
    Column("net", 4, lambda view, run: f"{view.recent.travel:.0%}"),
    Column("wait", 3, lambda view, run: f"{view.recent.wait:.0%}"),
    Column("memory", 8, lambda view, run: _memory(view)),
)


def screen(run: Snapshot, phase: tuple[str, float], now: float, width: int, height: int) -> RenderableType:
    """All of it, in so many columns and lines."""
    if run.started_at is None or run.step == 0:
        return _line(Text(line(run, phase, now), style="dim"))
    head: list[RenderableType] = [_title(run, width), *_progress(run, width), _line(_loss(run, width))]
    why = _why(run, width)
    room = height - len(head) - len(why) - 2  # the table's own head, and a line that stays free
    events = run.events[-LEAST_EVENTS:] if height >= ROOMY else ()
    rows = min(len(run.nodes), max(1, room - len(events)))
    events = run.events[-max(0, room - rows) :] if room > rows else ()
    return Group(*head, _nodes(run, width, rows), *why, *(_event(event) for event in events))


def spark(values: Sequence[float], width: int) -> str:
    """A line of small bars; what is not finite is a gap."""
    points = [value if math.isfinite(value) else None for value in values][-width:] if width > 0 else []
    sound = [value for value in points if value is not None]
    if sound and min(sound) > 0:  # losses fall by factors
        points = [None if value is None else math.log(value) for value in points]
        sound = [value for value in points if value is not None]
    low, high = min(sound, default=0.0), max(sound, default=0.0)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if value is None else BARS[round((value - low) * scale)] for value in points)


def _title(run: Snapshot, width: int) -> Text:
    present = [view for view in run.nodes if not view.is_silent]
    silent = len(run.nodes) - len(present)
    machines = {view.machine or view.host or str(view.totals.node) for view in present}
    where = f" on {counted(len(machines), 'machine')}" if len(machines) > 1 else ""
    exact = "exact" if run.is_exact else "not exact"
    text = Text(_cut(run.job, 24) or "run", style="bold")
    text.append(f" · {run.strategy}, {exact} · {counted(len(present), 'node')}{where}", style="not bold")
    if silent:
        text.append(f" · {silent} silent", style="not bold yellow")
    left = f"{duration(run.left_s)} left" if run.left_s is not None else f"{duration(run.elapsed_s)}"
    text.truncate(max(8, width - len(left) - 1), overflow="ellipsis", pad=True)
    text.append(f" {left}")
    return _line(text)


def _progress(run: Snapshot, width: int) -> list[RenderableType]:
    done = f"step {run.step:,}{f'/{run.steps:,}' if run.steps is not None else ''} · epoch {run.epoch + 1}"
    done += f" · {rate(run.batches_per_s)} batches/s"
    limits = ((run.step, run.steps), (run.elapsed_s, run.seconds))
    parts = [min(1.0, reached / total) for reached, total in limits if total]
    cells = min(BAR_CELLS, width - len(done) - 1)
    if not parts or cells < LEAST_BAR:
        return [_line(Text(done))]
    grid = Table.grid(padding=0)
    grid.add_row(ProgressBar(total=1.0, completed=max(parts), width=cells), Text(f" {done}", no_wrap=True))
    return [grid]


def _loss(run: Snapshot, width: int) -> Text:
    metrics = "".join(f" · {_cut(name, 20)} {number(value)}" for name, value in run.metrics.items())
    text = Text(f"loss {number(run.loss)} ")
    room = max(0, min(BAR_CELLS, width - cell_len(text.plain) - cell_len(metrics)))
    text.append(spark(_resampled(run.losses, room), room), style="cyan")
    text.append(metrics)
    return text


def _resampled(values: Sequence[float], count: int) -> list[float]:
    """At most so many, evenly taken."""
    if len(values) <= count:
        return list(values)
    return [values[i * len(values) // count] for i in range(count)]


def _why(run: Snapshot, width: int) -> list[Text]:
    """In two lines at most."""
    style = "green" if run.verdict.startswith(WELL) else "yellow"
    lines = textwrap.wrap(words.line(run.verdict), max(20, width), max_lines=2, placeholder=" …")
    return [_line(Text(part, style=style)) for part in lines]


def _nodes(run: Snapshot, width: int, rows: int) -> Table:
    """By number; if there are too many, those that should be seen."""
    views: Sequence[NodeView] = sorted(run.nodes, key=lambda view: view.totals.node)
    left_out = len(views) - rows + 1 if len(views) > rows else 0
    if left_out:  # some of those that are silent, then those that do most
        silent = [view for view in views if view.is_silent][: max(1, rows // 4)]
        busy = sorted((view for view in views if view not in silent), key=lambda view: -view.recent.batches_per_s)
        views = [*silent, *busy][: rows - 1 if rows > 2 else rows]
        left_out = len(run.nodes) - len(views) if rows > 2 else 0
    cells = {column: [column.cell(view, run) for view in views] for column in COLUMNS}
    columns = _that_fit(cells, width)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.title, justify="left" if column.is_text else "right", no_wrap=True)
    for i, view in enumerate(views):
        style = "yellow" if view.is_silent else ""
        table.add_row(*(Text(cells[column][i]) for column in columns), style=style)
    if left_out:
        table.add_row(Text(f"… and {left_out:,} more", style="dim"))
    return table


def _that_fit(cells: dict[Column, list[str]], width: int) -> list[Column]:
    columns = [column for column in cells if any(cell not in ("–", "") for cell in cells[column])]
    need = {column: 1 + max(map(cell_len, [column.title, *cells[column]])) for column in columns}
    while sum(need[column] for column in columns) > width + 1 and len(columns) > 1:
        columns.remove(max(columns, key=lambda column: column.rank))
    return columns


def _event(event: Event) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(event.at))
    text = Text(f"{at} ", style="dim")
    text.append(f"{event.kind:<10} ", style="yellow" if event.kind in WORRIES else "not dim")
    node = f"node {event.node} " if event.node is not None else ""
    text.append(words.line(f"{node}{event.words}"), style="not dim")
    return _line(text)


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _cut(text: str, cells: int) -> str:
    text = words.line(text)
    return text if cell_len(text) <= cells else set_cell_size(text, cells - 1).rstrip() + "…"
