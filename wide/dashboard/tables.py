"""What a report tells in numbers: totals, nodes, and how runs differ. Knows accounts; makes rows, and text of rows."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Any, NamedTuple

from wide.dashboard.account import Account, NodeAccount
from wide.dashboard.progress import duration, number, rate


class Figure(NamedTuple):
    """One number of a run: its name, its value if there is one, and how that is written."""

    name: str
    value: float | None
    shown: str


def figures(run: Account) -> list[Figure]:
    """All of one run."""
    nodes = [node.totals for node in run.nodes]
    worked = [totals for totals in nodes if totals.batches]
    network, codec = [t.network_s for t in worked], [t.codec_s for t in worked]
    carried = sum(t.bytes_sent + t.bytes_received for t in nodes)
    sent, raw = sum(t.bytes_sent for t in nodes), sum(t.raw_bytes for t in nodes)
    shares = [float(t.batches) for t in worked]
    steps, batches_per_s = run.brief.steps, run.batches / run.seconds
    found = [
        Figure("steps", steps, f"{steps:,}"),
        Figure("batches", run.batches, f"{run.batches:,}"),
        Figure("samples", run.samples, f"{run.samples:,}"),
        Figure("time", run.seconds, duration(run.seconds)),
        Figure("batches/s", batches_per_s, rate(batches_per_s)),
        Figure("samples/s", run.samples / run.seconds, rate(run.samples / run.seconds)),
        Figure("loss, first tenth", run.loss_first, number(run.loss_first)),
        Figure("loss, last tenth", run.loss_last, number(run.loss_last)),
    ]
    found += [Figure(name, value, number(value)) for name, value in run.brief.metrics.items()]
    found += [
        Figure("nodes", len(nodes), f"{len(nodes)}"),
        Figure("network, MB/s", carried / run.seconds / 1e6, f"{carried / run.seconds / 1e6:.3g}"),
        Figure("network time, least, s", *_least(network)),
        Figure("network time, most, s", *_most(network)),
        Figure("compression time, least, s", *_least(codec)),
        Figure("compression time, most, s", *_most(codec)),
        Figure("compression ratio", raw / sent if sent and raw else None, f"{raw / sent:.2f}" if sent and raw else "–"),
        Figure("memory of nodes, MB", *_of_memory(run.nodes)),
        Figure("batches a node", *_mean(shares)),
        Figure("variance of that", *_variance(shares)),
    ]
    return found


def node_rows(run: Account) -> tuple[list[str], list[list[str]]]:
    """A head, and a row for each node."""
    head = ["node", "name", "machine", "batches", "share", "samples", "batches/s", "sent", "received", "ratio"]
    head += ["compute s", "fetch s", "codec s", "network s", "memory", "left"]
    is_verified = any(node.totals.verified_samples for node in run.nodes)
    if is_verified:
        head.insert(head.index("samples") + 1, "verified")
    rows = []
    for node in run.nodes:
        t = node.totals
        stay_s = (node.left_at or time.time()) - node.joined_at if node.joined_at is not None else run.seconds
        row = [str(t.node), t.name, node.host, f"{t.batches:,}", f"{t.batches / max(1, run.batches):.1%}"]
        row += [f"{t.samples:,}", *([f"{t.verified_samples:,}"] if is_verified else [])]
        row += [rate(t.batches / max(stay_s, 1e-9)), size(t.bytes_sent), size(t.bytes_received)]
        row += [f"{t.compression_ratio:.2f}", f"{t.compute_s:.2f}", f"{t.fetch_s:.2f}", f"{t.codec_s:.2f}"]
        rows.append([*row, f"{t.network_s:.2f}", size(t.rss_bytes), node.why])
    return head, rows


def compared(runs: Sequence[Account]) -> tuple[list[str], list[list[str]]]:
    """The figures of all, and by how much each differs from the first."""
    head = ["", runs[0].name]
    for run in runs[1:]:
        head += [run.name, "change"]
    all_figures = [{figure.name: figure for figure in figures(run)} for run in runs]
    names = list(dict.fromkeys(name for found in all_figures for name in found))
    rows = []
    for name in names:
        first = all_figures[0].get(name)
        row = [name, first.shown if first is not None else "–"]
        for found in all_figures[1:]:
            figure = found.get(name)
            row += [figure.shown if figure is not None else "–", change(first, figure)]
        rows.append(row)
    return head, rows


def change(before: Figure | None, after: Figure | None) -> str:
    """`+40.8 %`; nothing, where that says nothing."""
    if before is None or after is None or not before.value or after.value is None:
        return "–"
    percent = round(100 * (after.value / before.value - 1), 1)
    return f"{percent:+.1f} %" if percent else "="


def differences(runs: Sequence[Account]) -> list[list[str]]:
    """What was asked for, where that is not the same in all runs."""
    asked = [{**_plain(run.session.get("options"))} for run in runs]
    names = sorted({name for options in asked for name in options} - {"out", "resume", "port"})
    rows = []
    for name in names:
        values = [str(options.get(name)) for options in asked]
        if len(set(values)) > 1:
            rows.append([f"--{name.replace('_', '-')}", *values])
    return rows


def as_markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(escaped(cell) for cell in line) + " |" for line in lines)


def as_text(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of words, for a terminal."""
    lines = [list(head), *map(list, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|!])", r"\\\1", text).replace("<", "&lt;")


def _plain(options: Any) -> dict[str, Any]:
    return options if isinstance(options, dict) else {}


def _least(values: list[float]) -> tuple[float | None, str]:
    return (min(values), f"{min(values):.3g}") if values else (None, "–")


def _most(values: list[float]) -> tuple[float | None, str]:
    return (max(values), f"{max(values):.3g}") if values else (None, "–")


def _mean(values: list[float]) -> tuple[float | None, str]:
    return (fmean(values), f"{fmean(values):,.1f}") if values else (None, "–")


def _variance(values: list[float]) -> tuple[float | None, str]:
    return (pvariance(values), f"{pvariance(values):,.0f}") if values else (None, "–")


def _of_memory(nodes: Sequence[NodeAccount]) -> tuple[float | None, str]:
    total = sum(node.totals.rss_bytes for node in nodes) / 1e6
    return (total, f"{total:,.0f}") if total else (None, "–")
