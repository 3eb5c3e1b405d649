"""One run, looked at again and again: what a page needs to be filled, and what is new since a moment ago.

Knows run.db by way of accounts and leases. Whatever becomes of the run's folder, looking does not fail.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from wide.dashboard import charts
from wide.dashboard.account import RUNNING, account, finite, look, saved_sha256
from wide.dashboard.bars import Span, picture
from wide.dashboard.leases import Leases
from wide.dashboard.openmetrics import openmetrics
from wide.dashboard.runs import given
from wide.errors import UsageError
from wide.store.reading import Reading
from wide.telemetry.snapshot import NodeView, Snapshot
from wide.wire import words

GONE = "cannot be read"
MOST_NODES = 64  # told of every second; of all others when somebody asks
MOST_LEFT = 100
NEW_POINTS = 40  # of losses, in a second
TAIL = 200  # steps, by which the time left is guessed
NEW_STEPS = "SELECT step, samples, loss, seconds FROM steps WHERE step > ? ORDER BY step"
STRIKES = """SELECT node, reason, count(*) FROM rejects
    WHERE node IS NOT NULL AND reason NOT IN ('late', 'duplicate') GROUP BY node, reason"""
CHOICES = "SELECT node, role, codec, reason, max(rowid) FROM choices WHERE node IS NOT NULL GROUP BY node, role"
EVENTS = "SELECT rowid, at, kind, node, words FROM events ORDER BY rowid DESC LIMIT ?"
MOST_EVENTS = 1000
MOST_KEPT = 20  # answers
LISTENING = "listening.json"  # of pools that others may join

UNREADABLE = (UsageError, ValueError, TypeError, ArithmeticError)  # a run that is gone, or has nonsense in it

Data = dict[str, Any]


class Followed:
    """Asked by several threads; what it answers is kept for a moment, and the longer, the longer it took to find."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._leases = Leases()
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, bytes]] = {}
        self._identity: float | None = None
        self._step, self._sums = -1, (0, 0.0)  # the last one that was told; samples and seconds until then
        self.beginnings = 0  # how often it was seen to begin anew

    # ── every second ─────────────────────────────────────────────────────────────────────────────────────────────

    def news(self) -> Data:
        """How it stands, and the losses since the last time."""
        try:
            brief, snapshot = look(self.folder)
            with Reading(self.folder) as run:
                losses, left = self._new_losses(run), _left(run, snapshot)
        except UNREADABLE as error:
            return {"run": self.name, "state": GONE, "why": words.line(str(error))}
        told: Data = {
            "run": self.name,
            "job": brief.job,
            "strategy": brief.strategy,
            "state": brief.state,
            "why": brief.why,
        }
        told |= {"losses": losses, "beginnings": self.beginnings, "metrics": brief.metrics, "seconds": brief.seconds}
        told |= {"weights_sha256": saved_sha256(self.folder), "is_served": (self.folder / LISTENING).exists()}
        if snapshot is None:
            return told
        live = _live(snapshot, left)
        if brief.state != RUNNING:  # all in all, as `wide show` has it
            live["batches_per_s"] = snapshot.batches / brief.seconds if brief.seconds > 0 else 0.0
        return told | live

    def _new_losses(self, run: Reading) -> list[list[float | None]]:
        """[step, samples and seconds until then, loss], as few as a picture needs."""
        (last,) = (run.rows("steps", "SELECT max(step) FROM steps") or [(-1,)])[0]
        is_another, self._identity = run.identity != self._identity, run.identity
        if (last if last is not None else -1) < self._step or (is_another and self._step >= 0):
            self._step, self._sums = -1, (0, 0.0)
            self.beginnings += 1  # a run that goes on from a checkpoint computes its last steps again
        rows = run.rows("steps", NEW_STEPS, self._step)
        samples, seconds = self._sums
        found: list[list[float | None]] = []
        size = max(1, len(rows) // NEW_POINTS)
        for i in range(0, len(rows), size):
            some = rows[i : i + size]
            samples += sum(row[1] or 0 for row in some)
            seconds += sum(row[3] or 0.0 for row in some)
            sound = [row[2] for row in some if row[2] is not None]
            found.append([some[-1][0] + 1, samples, seconds, sum(sound) / len(sound) if sound else None])
        self._step, self._sums = (rows[-1][0] if rows else self._step), (samples, seconds)
        return found

    # ── when somebody asks ───────────────────────────────────────────────────────────────────────────────────────

    def about(self) -> bytes:
        return self._keeping("about", self._about)

    def curves(self, first: float | None, last: float | None, points: int) -> bytes:
        """Losses between two steps, and all evaluations."""
        key = f"curves {first} {last} {points}"
        return self._keeping(key, lambda run: charts.losses(run, first, last, points) | charts.evaluations(run))

    def series(self, points: int) -> bytes:
        """What was counted second by second: of each node, and of all."""
        return self._keeping(f"series {points}", lambda run: charts.series(run, points))

    def node(self, number: int, points: int) -> bytes:
        return self._keeping(f"node {number} {points}", lambda run: charts.of_node(run, number, points))

    def events(self) -> bytes:
        return self._keeping("events", lambda run: {"events": _events(run)})

    def metrics(self) -> bytes:
        """As OpenMetrics has it."""
        return self._keeping("metrics", self._metrics)

    def _metrics(self, run: Reading) -> bytes:
        found = account(self.folder)
        return openmetrics(found.brief, found.snapshot).encode()

    def warm(self) -> None:
        """Before anybody asks: a million leases take a second to read."""
        with contextlib.suppress(UsageError), self._lock, Reading(self.folder) as run:
            self._leases.read(run)

    def timeline(self, span: Span, columns: int, first: int, rows: int) -> bytes:
        """What was done in that time, in seconds after the run's first lease; by so many nodes, from the `first`."""
        return self._keeping(
            f"{span} {columns} {first} {rows}", lambda run: self._picture(run, span, columns, first, rows)
        )

    def _picture(self, run: Reading, span: Span, columns: int, first: int, rows: int) -> Data:
        self._leases.read(run)
        return picture(self._leases, run, span, columns, slice(first, first + rows))

    def _keeping(self, key: str, find: Callable[[Reading], Data | bytes]) -> bytes:
        """However many ask, what they are given is there once."""
        with self._lock:
            now = time.monotonic()
            kept = {name: kept for name, kept in self._kept.items() if kept[0] > now}
            self._kept = dict(list(kept.items())[-MOST_KEPT:])
            if key not in self._kept:
                with Reading(self.folder) as run:
                    found = find(run)
                took_s = time.monotonic() - now
                data = found if isinstance(found, bytes) else msgspec.json.encode(found)
                self._kept[key] = (time.monotonic() + max(0.5, 10 * took_s), data)
            return self._kept[key][1]

    def _about(self, run: Reading) -> Data:
        all_of_it = account(self.folder)
        brief, session = all_of_it.brief, all_of_it.session
        strikes: dict[int, dict[str, int]] = {}
        for node, reason, count in run.rows("rejects", STRIKES):
            strikes.setdefault(node, {})[words.line(str(reason))] = count
        choices: dict[int, dict[str, list[str]]] = {}
        for node, role, codec, reason, _ in run.rows("choices", CHOICES):
            choices.setdefault(node, {})[words.line(str(role))] = [words.line(str(codec)), words.line(str(reason))]
        present = {view.totals.node: view for view in all_of_it.snapshot.nodes} if all_of_it.snapshot else {}
        there = present if brief.state == RUNNING else {}
        nodes = [
            asdict(one.totals)
            | {"host": one.host, "joined_at": finite(one.joined_at), "left_at": finite(one.left_at), "why": one.why}
            | {"strikes": strikes.get(one.totals.node, {}), "choices": choices.get(one.totals.node, {})}
            | {"build": words.line(present[one.totals.node].build) if one.totals.node in present else ""}
            | {"is_here": one.totals.node in there}
            for one in all_of_it.nodes
        ]
        nodes.sort(key=lambda node: (not node["is_here"], -node["batches"]))
        here = sum(node["is_here"] for node in nodes)
        command = session.get("command")
        return {
            "run": self.name,
            "folder": words.line(str(brief.folder)),
            "job": brief.job,
            "state": brief.state,
            "why": brief.why,
            "began_at": brief.began_at,
            "sessions": all_of_it.sessions,
            "command": [words.line(str(word)) for word in command] if isinstance(command, list) else [],
            "given": given(session),
            "weights_sha256": all_of_it.weights_sha256,
            "rejects": all_of_it.rejects,
            "batches": all_of_it.batches,
            "samples": all_of_it.samples,
            "nodes": nodes[: here + MOST_LEFT],
            "nodes_in_all": len(nodes),
        }


def _events(run: Reading) -> list[list[Any]]:
    """The newest first."""
    rows = run.rows("events", EVENTS, MOST_EVENTS)
    return [
        [number, finite(at), words.name(str(kind)), node, words.line(str(text)[: charts.MOST_CHARS])]
        for number, at, kind, node, text in rows
    ]


def _live(run: Snapshot, left: list[float] | None) -> Data:
    """Of a picture, what a page shows."""
    nodes = sorted(run.nodes, key=lambda view: (not view.is_silent, -view.recent.batches_per_s))[:MOST_NODES]
    return {
        "step": run.step,
        "steps": run.steps,
        "epoch": run.epoch,
        "version": run.version,
        "batches": run.batches,
        "elapsed_s": run.elapsed_s,
        "seconds_limit": run.seconds,
        "left_s": run.left_s,
        "left_between": left,
        "loss": run.loss,
        "is_exact": run.is_exact,
        "is_paused": run.is_paused,
        "batches_per_s": run.batches_per_s,
        "possible": run.possible,
        "used": run.used,
        "busy": run.busy,
        "verdict": words.line(run.verdict),
        "why_slow": [words.line(line) for line in run.why_slow],
        "waits_for": words.line(run.waits_for),
        "nodes_in_all": len(run.nodes),
        "nodes_silent": sum(view.is_silent for view in run.nodes),
        "nodes": [_node(view, run) for view in sorted(nodes, key=lambda view: view.totals.node)],
    }


def _node(view: NodeView, run: Snapshot) -> Data:
    totals, recent, link = view.totals, view.recent, view.link
    is_far = link is not None and not link.is_here
    build = words.line(view.build).split(", ")
    return {
        "node": totals.node,
        "name": words.line(totals.name),
        "host": words.line(view.host),
        "device": build[1] if len(build) > 1 else "",
        "state": view.state,
        "batches": totals.batches,
        "share": totals.batches / max(1, run.batches),
        "batches_per_s": recent.batches_per_s,
        "computes_per_s": link.computes_batches_per_s if link is not None else 0.0,
        "up": link.up_bytes_per_s if link is not None and is_far else None,
        "down": link.down_bytes_per_s if link is not None and is_far else None,
        "codecs": link.codecs if link is not None and is_far else {},
        "compute": recent.compute,
        "fetch": recent.fetch,
        "codec": recent.codec,
        "travel": recent.travel,
        "wait": recent.wait,
        "rss_bytes": totals.rss_bytes,
        "staleness": view.staleness,
    }


def _left(run: Reading, snapshot: Snapshot | None) -> list[float] | None:
    """Between which times it should be done: by how much its last steps differed."""
    if snapshot is None or snapshot.steps is None or snapshot.left_s is None or snapshot.steps <= snapshot.step:
        return None
    rows = run.rows("steps", "SELECT step, seconds FROM steps ORDER BY step DESC LIMIT ?", TAIL)
    spent = np.array([seconds or 0.0 for _, seconds in rows])
    if len(spent) < 20:
        return None
    paces = [float(some.mean()) for some in np.array_split(spent, 10)]
    low, high = np.quantile(paces, [0.1, 0.9]) / max(float(np.mean(paces)), 1e-9)
    return [snapshot.left_s * float(low), snapshot.left_s * float(high)]
