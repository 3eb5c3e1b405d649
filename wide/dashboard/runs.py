"""`wide runs` and `wide show`: what runs there are, and one of them, in words. Knows accounts."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wide.config import Options
from wide.dashboard.account import DIED, Brief, account, brief, moment
from wide.dashboard.progress import duration, number
from wide.dashboard.tables import as_text, figures, node_rows
from wide.errors import UsageError
from wide.job.spec import written
from wide.store.reading import DATABASE
from wide.store.sessions import plain
from wide.wire.words import line

SHOWN = 30
DEFAULTS = {name: plain(getattr(Options(), name)) for name in Options.__struct_fields__}


def runs_in(folder: Path) -> list[Path]:
    """Folders with a run, the newest last: by name, which begins with the time unless somebody chose another."""
    if not folder.is_dir():
        raise UsageError(f"{folder}: there is no such folder; give one that holds runs (default: runs)")
    with os.scandir(folder) as entries:
        found = [Path(entry.path) for entry in entries if entry.is_dir()]
    when = {}
    for path in found:
        with contextlib.suppress(OSError):  # none, or it was deleted just now
            when[path] = (path / DATABASE).stat().st_mtime
    return sorted(when, key=lambda path: when[path])


def listed(folder: Path, is_all: bool = False, width: int | None = None) -> str:
    """A line each, the newest last; where there is not room for all, the least telling columns are left out."""
    paths = runs_in(folder)
    if not paths:
        return f"{folder}: no runs yet"
    shown = paths if is_all else paths[-SHOWN:]
    rows = []
    for path in shown:
        try:
            rows.append(_row(brief(path)))
        except UsageError:
            rows.append([path.name, "", "", "", "cannot be read", "", "", "", "", ""])
    head = ["run", "job", "set", "strategy", "state", "steps", "loss", "metrics", "begun", "took"]
    for name in ("set", "job", "begun", "metrics", "took", "strategy"):
        place = head.index(name)
        is_empty = name == "set" and not any(row[place] for row in rows)
        if is_empty or (width is not None and max(map(len, as_text(head, rows).splitlines())) > width):
            head, rows = [*head[:place], *head[place + 1 :]], [[*row[:place], *row[place + 1 :]] for row in rows]
    more = f"\n… and {len(paths) - len(shown):,} older ones (--all)" if len(paths) > len(shown) else ""
    return as_text(head, rows) + more


def told(folder: Path) -> str:
    """One run: how it was begun, what came of it, who took part, how to go on."""
    run = account(folder)
    short, session = run.brief, run.session
    command = session.get("command")
    lines = [f"{short.job}: {short.strategy}{', exact' if run.is_exact else ''}, {short.state}"]
    if short.began_at is not None:
        begun = moment(short.began_at, "%Y-%m-%d %H:%M:%S")
        again = f", {run.sessions} times in all" if run.sessions > 1 else ""
        lines.append(f"begun    {begun}{again}")
    if isinstance(command, list):
        lines.append(f"command  {line(shlex.join(str(word) for word in command))}")
    lines += [f"{name:<8} {words}" for name, words in given(session).items()]
    if run.weights_sha256:
        lines.append(f"weights  {run.weights_sha256}")
    lines += ["", as_text(["figure", "value"], [[figure.name, figure.shown] for figure in figures(run)])]
    lines += ["", as_text(*node_rows(run))] if run.nodes else []
    if run.rejects:
        lines += ["", "refused  " + ", ".join(f"{reason} {count}" for reason, count in run.rejects.items())]
    if run.snapshot is not None and run.snapshot.verdict:
        lines += ["", line(run.snapshot.verdict)]
    lines += ["", *_last_words(short)]
    return "\n".join(lines)


def given(session: Mapping[str, Any]) -> dict[str, str]:
    """What a run was begun with: its job's values, options that are not as usual, versions, machine."""
    found = {}
    if isinstance(values := session.get("set"), dict) and values:
        found["set"] = line(written(values))
    for name in ("options", "versions", "machine"):
        if isinstance(values := session.get(name), dict):
            usual = DEFAULTS if name == "options" else {}
            told = ", ".join(f"{key} {value}" for key, value in values.items() if value not in (None, usual.get(key)))
            found[name] = line(told) or "as usual"
    return found


def _last_words(run: Brief) -> list[str]:
    lines = [f"last words: {run.why}"] if run.why else []
    job = run.spec or "JOB"
    if run.state == DIED:
        lines.append("its coordinator ended without a word")
    if run.state == "running":
        lines.append(f"look at it: wide top {run.folder}")
    elif run.state != "done":
        lines.append(f"go on with: wide run {shlex.quote(job)} --resume {run.folder}")
    else:
        lines.append(f"its weights as a file: wide export {run.folder}; a page about it: wide report {run.folder}")
    return lines


def _row(run: Brief) -> list[str]:
    when = moment(run.began_at, "%m-%d %H:%M")
    metrics = ", ".join(f"{name} {number(value)}" for name, value in run.metrics.items())
    took = duration(run.seconds)
    loss = number(run.loss) if run.steps else "–"
    about = [run.folder.name, run.job, run.set[:40], run.strategy, run.state]
    return [*about, f"{run.steps:,}", loss, metrics[:40], when, took]
