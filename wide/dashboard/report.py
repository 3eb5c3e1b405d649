"""Reports: one run, or several side by side, as one HTML page that needs nothing from outside; as Markdown; as JSON.

Knows accounts, tables and pictures. All text that comes from a run is escaped here.
"""

from __future__ import annotations

import html
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wide.dashboard.account import Account, account, finite, moment
from wide.dashboard.curves import losses, memories, metrics_of, node_name, speeds
from wide.dashboard.progress import duration
from wide.dashboard.runs import given
from wide.dashboard.svg import Curve, plot, round_numbers
from wide.dashboard.tables import as_markdown, compared, differences, escaped, figures, node_rows
from wide.dashboard.timeline import KINDS, MEANINGS, ROW_PIXELS, Timeline, timeline
from wide.store.reading import Reading
from wide.wire import words

MOST_EVENTS = 200
REFUSALS = {
    "late": "somebody else had computed the same by then: no work is lost",
    "duplicate": "said twice, counted once",
    "stale": "computed from weights that are too old by now; computed again",
    "not finite": "not a number: never merged",
}
NUMBER = re.compile(r"[-+\d.,e]*( ?%| [kMG]?B| s| min| h)?$|–$")
EVENTS = "SELECT at, kind, node, words FROM (SELECT rowid, * FROM events ORDER BY rowid DESC LIMIT ?) ORDER BY rowid"
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1320px; padding: 20px; }
h1 { margin: 0 0 4px; font-size: 26px; } h2 { margin: 34px 0 8px; font-size: 18px; }
.badge { border: 1px solid; border-radius: 10px; padding: 1px 9px; font-size: 13px; white-space: nowrap; }
.good { color: #00825f; } .bad { color: #b34700; }
@media (prefers-color-scheme: dark) { .good { color: #3fd0a4; } .bad { color: #ff9a52; } }
.plots { display: flex; flex-wrap: wrap; gap: 18px; } .plots > div { max-width: 620px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid rgba(128,128,128,.25); white-space: nowrap; }
th.text, td.text { text-align: left; }
code, pre { font: 13px ui-monospace, monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
.quiet { opacity: .7; }
"""


def report(folders: Sequence[Path], kind: str) -> str:
    """About one run; or, if there are several, how they compare. `kind`: html, md or json."""
    runs = [account(folder) for folder in folders]
    if kind == "json":
        return json.dumps(_as_data(runs), indent=1)
    if kind == "md":
        return _as_markdown(runs)
    return _page(runs[0]) if len(runs) == 1 else _comparison(runs)


# ── one run ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _page(run: Account) -> str:
    with Reading(run.brief.folder) as reading:
        parts = [
            _head(run),
            _why(run),
            "<h2>How it went</h2>",
            _plots(run, reading),
            _timeline(run, timeline(reading)),
            "<h2>In numbers</h2>",
            _figures(run),
            "<h2>Nodes</h2>",
            _table(*node_rows(run)),
            _refused(run),
            _events(reading),
            _origin(run),
        ]
    return _document(run.name, "".join(parts))


def _head(run: Account) -> str:
    brief, when = run.brief, moment(run.brief.began_at, "%Y-%m-%d %H:%M")
    exact = '<span class="badge good">exact</span>' if run.is_exact else '<span class="badge bad">not exact</span>'
    state = "good" if brief.state in ("done", "running") else "bad"
    sha = f" · weights <code>{_text(run.weights_sha256[:16])}…</code>" if run.weights_sha256 else ""
    last = f"<p>{_text(brief.why)}</p>" if brief.why else ""
    return (
        f"<h1>{_text(brief.job)}</h1><p>{_text(brief.strategy)} {exact} "
        f'<span class="badge {state}">{_text(brief.state)}</span> begun {when}, '
        f"{duration(brief.seconds)}{sha}</p>{last}"
    )


def _why(run: Account) -> str:
    if run.snapshot is None or not run.snapshot.verdict:
        return ""
    found = run.snapshot.why_slow
    lines = found or (run.snapshot.verdict,)
    title = "What was in the way" if found else "Was anything in the way?"
    return f"<h2>{title}</h2><ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _plots(run: Account, reading: Reading) -> str:
    pictures = [
        plot("loss", [losses(reading, "loss")], "step"),
        plot("loss, over time", [losses(reading, "loss", by_time=True)], "seconds"),
        *(plot(metric, [curve], "step") for metric, curve in metrics_of(reading).items()),
        plot("batches/s", speeds(run, reading), "seconds", from_zero=True),
        plot("memory of nodes, MB", memories(run, reading), "seconds", from_zero=True),
    ]
    return f'<div class="plots">{"".join(f"<div>{picture}</div>" for picture in pictures)}</div>'


def _timeline(run: Account, found: Timeline | None) -> str:
    if found is None:
        return ""
    left, row = 110, ROW_PIXELS + 3
    width, height = left + 1200, found.height + 22
    labels = "".join(
        f'<text x="{left - 6}" y="{i * row + 11}" text-anchor="end">{_text(node_name(run, node)[:16])}</text>'
        for i, node in enumerate(found.nodes)
    )
    span = found.ended_at - found.began_at
    ticks = "".join(
        f'<text x="{left + 1200 * tick / span:.0f}" y="{height - 6}" text-anchor="middle">{tick:,.6g} s</text>'
        for tick in round_numbers(0.0, span)
        if tick <= 0.98 * span
    )
    legend = "".join(
        f'<span style="white-space:nowrap"><span style="display:inline-block;width:12px;height:12px;'
        f'background:{colour}"></span> {MEANINGS.get(kind, kind)}</span>'
        for kind, colour in KINDS.items()
    )
    more = f'<p class="quiet">{found.left_out:,} more nodes are not shown.</p>' if found.left_out else ""
    return (
        f'<h2>Lease timeline</h2><div class="scroll"><svg viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="what each node did when" font-family="sans-serif" font-size="11" '
        f'fill="currentColor">{labels}<image href="{found.data_url}" x="{left}" y="0" width="1200" '
        f'height="{found.height}" style="image-rendering:pixelated"/>{ticks}</svg></div>'
        f'<div style="font-size:13px;display:flex;flex-wrap:wrap;gap:4px 16px">{legend}</div>{more}'
    )


def _figures(run: Account) -> str:
    rows = [[figure.name, figure.shown] for figure in figures(run)]
    third = -(-len(rows) // 3)
    columns = "".join(_table(["", ""], rows[i : i + third]) for i in range(0, len(rows), third))
    return f'<div class="plots">{columns}</div>'


def _refused(run: Account) -> str:
    rows = [[reason, f"{count:,}", REFUSALS.get(reason, "")] for reason, count in run.rejects.items()]
    return f"<h2>What was refused</h2>{_table(['reason', 'times', ''], rows)}" if rows else ""


def _events(reading: Reading) -> str:
    rows = [
        [moment(at, "%m-%d %H:%M:%S"), kind, "" if node is None else str(node), words.line(text)]
        for at, kind, node, text in reading.rows("events", EVENTS, MOST_EVENTS)
    ]
    return f"<h2>What happened</h2>{_table(['when', 'what', 'node', ''], rows)}" if rows else ""


def _origin(run: Account) -> str:
    session = run.session
    command = session.get("command")
    line = shlex.join(str(word) for word in command) if isinstance(command, list) else ""
    text = "\n".join(f"{name}: {told}" for name, told in given(session).items())
    again = f", begun {run.sessions} times" if run.sessions > 1 else ""
    return f"<h2>How it was begun{again}</h2><pre>{_text(line)}</pre><pre class='quiet'>{_text(text)}</pre>"


# ── several ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _comparison(runs: Sequence[Account]) -> str:
    by_step, by_time = [], []
    metrics: dict[str, list[Curve]] = {}
    for run in runs:
        with Reading(run.brief.folder) as reading:
            by_step.append(losses(reading, run.name))
            by_time.append(losses(reading, run.name, by_time=True))
            for metric, curve in metrics_of(reading).items():
                metrics.setdefault(metric, []).append(curve._replace(name=run.name))
    pictures = [plot("loss", by_step, "step"), plot("loss, over time", by_time, "seconds")]
    pictures += [plot(metric, curves, "step") for metric, curves in metrics.items()]
    plots = f'<div class="plots">{"".join(f"<div>{picture}</div>" for picture in pictures)}</div>'
    asked = differences(runs)
    wishes = f"<h2>What was asked</h2>{_table(['', *(run.name for run in runs)], asked)}" if asked else ""
    hashes = {run.weights_sha256 for run in runs}
    same = "<p>All have the same weights, to the bit.</p>" if len(hashes) == 1 and "" not in hashes else ""
    about = _table(["run", "job", "strategy", "exact", "state", "weights"], [_short(run) for run in runs])
    body = f"<h1>{len(runs)} runs</h1>{about}{same}{plots}<h2>In numbers</h2>{_table(*compared(runs))}{wishes}"
    return _document(f"{len(runs)} runs", body)


def _short(run: Account) -> list[str]:
    exact = "exact" if run.is_exact else "not exact"
    return [run.name, run.brief.job, run.brief.strategy, exact, run.brief.state, run.weights_sha256[:12] or "–"]


# ── other forms ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _as_markdown(runs: Sequence[Account]) -> str:
    if len(runs) > 1:
        parts = [f"# {len(runs)} runs", as_markdown(*compared(runs))]
        if asked := differences(runs):
            parts += ["## What was asked", as_markdown(["", *(run.name for run in runs)], asked)]
        return "\n\n".join(parts) + "\n"
    run = runs[0]
    told = escaped(words.line(run.snapshot.verdict)) if run.snapshot is not None else ""
    head = f"{run.brief.strategy}, {run.brief.state}, {duration(run.brief.seconds)}. {escaped(run.brief.why)}"
    table = as_markdown(["", ""], [[figure.name, figure.shown] for figure in figures(run)])
    return "\n\n".join([f"# {escaped(run.name)}", head, told, table, "## Nodes", as_markdown(*node_rows(run))]) + "\n"


def _as_data(runs: Sequence[Account]) -> dict[str, Any]:
    return {"schema": "wide.report/1", "runs": [_run_data(run) for run in runs]}


def _run_data(run: Account) -> dict[str, Any]:
    brief, told = run.brief, run.snapshot
    return {
        "run": str(brief.folder),
        "job": brief.job,
        "strategy": brief.strategy,
        "state": brief.state,
        "is_exact": run.is_exact,
        "why": brief.why,
        "weights_sha256": run.weights_sha256,
        "figures": {figure.name: finite(figure.value) for figure in figures(run)},
        "metrics": brief.metrics,
        "rejects": run.rejects,
        "why_slow": list(told.why_slow) if told is not None else [],
        "nodes": [asdict(node.totals) | {"host": node.host, "why": node.why} for node in run.nodes],
    }


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers stand on the right, those with any words on the left."""
    words_in = [any(not NUMBER.match(row[i]) for row in rows) for i in range(len(head))]
    mark = ["class=text" if has_words else "" for has_words in words_in]
    top = "".join(f"<th {how}>{_text(cell)}</th>" for cell, how in zip(head, mark, strict=True)) if any(head) else ""
    lines = ("".join(f"<td {how}>{_text(cell)}</td>" for cell, how in zip(row, mark, strict=True)) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _document(title: str, body: str) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def _text(text: str) -> str:
    return html.escape(text)
