"""What there is to say about a run, read from its folder: how it was begun, how far it came, who did what.

Knows run.db and run.json, of runs that are over and of those that go on; a half-written one gives what there is.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import msgspec

from wide.job.spec import title_of, written
from wide.store.lock import is_held
from wide.store.reading import Reading
from wide.store.sessions import sessions
from wide.telemetry.snapshot import Snapshot, decoded
from wide.telemetry.totals import NodeTotals
from wide.wire import words

RUNNING, DIED = "running", "died"  # the one says so itself, the other could not
TOTALS = {one.name for one in fields(NodeTotals)}
LAST_OF_EACH = "SELECT node, metric, value, max(at) FROM samples WHERE node IS NOT NULL GROUP BY node, metric"


@dataclass(frozen=True)
class Brief:
    """One line about a run, quickly read."""

    folder: Path
    job: str = ""
    strategy: str = ""
    state: str = ""
    steps: int = 0
    loss: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    began_at: float | None = None
    seconds: float = 0.0
    why: str = ""  # the last words
    spec: str = ""  # where its job is
    set: str = ""  # the values of a job that is a function


@dataclass(frozen=True)
class NodeAccount:
    """One node's part: what it did, where it ran, when it came and went, and why."""

    totals: NodeTotals
    host: str = ""
    joined_at: float | None = None
    left_at: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Account:
    """All about a run, but for its curves."""

    brief: Brief
    session: dict[str, Any]  # the last one, as run.json has it
    began: dict[str, Any]  # the first one
    sessions: int
    snapshot: Snapshot | None
    batches: int
    samples: int
    loss_first: float | None
    loss_last: float | None
    nodes: list[NodeAccount]
    rejects: dict[str, int]
    weights_sha256: str = ""
    is_exact: bool = False

    @property
    def seconds(self) -> float:
        return max(self.brief.seconds, 1e-9)

    @property
    def name(self) -> str:
        return words.line(self.brief.folder.resolve().name)


def brief(folder: Path) -> Brief:
    """Raises UsageError if there is no run, or none that can be read."""
    told = sessions(folder)
    with Reading(folder) as run:
        return _brief(folder, told, run, _snapshot(run))


def look(folder: Path) -> tuple[Brief, Snapshot | None]:
    """The same, and the newest picture: for whoever looks again and again."""
    told = sessions(folder)
    with Reading(folder) as run:
        snapshot = _snapshot(run)
        return _brief(folder, told, run, snapshot), snapshot


def account(folder: Path) -> Account:
    told = sessions(folder)
    with Reading(folder) as run:
        snapshot = _snapshot(run)
        short = _brief(folder, told, run, snapshot)
        steps = run.rows("steps", "SELECT step, loss, samples FROM steps ORDER BY step")
        loss_first, loss_last = _tenths([(step, loss) for step, loss, _ in steps])
        batches = snapshot.batches if snapshot is not None else 0
        if not batches:  # of an older version
            ((batches,),) = run.rows("ledger", "SELECT sum(last_batch - first_batch + 1) FROM ledger") or [(0,)]
        rejects = run.rows("rejects", "SELECT reason, count(*) FROM rejects GROUP BY reason ORDER BY 2 DESC")
        return Account(
            brief=short,
            session=told[-1] if told else {},
            began=told[0] if told else {},
            sessions=len(told),
            snapshot=snapshot,
            batches=batches or 0,
            samples=sum(samples or 0 for _, _, samples in steps),
            loss_first=loss_first,
            loss_last=loss_last,
            nodes=_nodes(run),
            rejects={words.line(reason): count for reason, count in rejects},
            weights_sha256=saved_sha256(folder),
            is_exact=snapshot.is_exact if snapshot is not None else False,
        )


def _tenths(steps: list[tuple[int, float | None]]) -> tuple[float | None, float | None]:
    """Mean losses of the first and of the last tenth of the steps; an old row stands for all since the one before."""
    if not steps:
        return None, None
    count, before = steps[-1][0] + 1, -1
    tenth = max(1, count // 10)
    sums = [[0.0, 0], [0.0, 0]]
    for step, loss in steps:
        for (first, end), found in zip(((0, tenth), (count - tenth, count)), sums, strict=True):
            steps_in = min(step + 1, end) - max(before + 1, first)
            if steps_in > 0 and loss is not None:
                found[0] += loss * steps_in
                found[1] += steps_in
        before = step
    first_mean, last_mean = (total / number if number else None for total, number in sums)
    return first_mean, last_mean


def moment(at: Any, form: str) -> str:
    """A time, as the wall's clock showed it; "?", if it was none."""
    try:
        return time.strftime(form, time.localtime(at))
    except (OSError, OverflowError, ValueError, TypeError):
        return "?"


def finite(value: Any) -> float | None:
    """A number that can be shown, or None."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _brief(folder: Path, told: list[dict[str, Any]], run: Reading, snapshot: Snapshot | None) -> Brief:
    last = told[-1] if told else {}
    ((step, loss),) = run.rows("steps", "SELECT step, loss FROM steps ORDER BY step DESC LIMIT 1") or [(-1, None)]
    found: dict[str, float | None] = {}
    query = "SELECT metric, value FROM evaluations ORDER BY rowid DESC LIMIT 16"
    for metric, value in run.rows("evaluations", query):
        found.setdefault(words.line(str(metric)), finite(value))
    for metric, value in run.rows("logged", "SELECT metric, value FROM logged ORDER BY rowid DESC LIMIT 16"):
        found.setdefault(words.line(str(metric)), finite(value))
    return Brief(
        folder=folder,
        job=words.line(_job(last, folder)),
        strategy=snapshot.strategy if snapshot is not None else str(_options(last).get("strategy") or "sync"),
        state=_state(last, folder),
        steps=step + 1,
        loss=finite(loss),
        metrics=dict(reversed(found.items())),
        began_at=finite(told[0].get("began_at")) if told else None,
        seconds=snapshot.elapsed_s if snapshot is not None else _span(last),
        why=words.line(str(last.get("why") or "")),
        spec=words.line(_spec(last)),
        set=words.line(written(last["set"])) if isinstance(last.get("set"), dict) else "",
    )


def _job(session: Mapping[str, Any], folder: Path) -> str:
    job = session.get("job")
    if isinstance(job, dict) and isinstance(job.get("file"), str):
        return title_of(Path(job["file"]))
    return folder.resolve().name.split("-", 2)[-1]


def _spec(session: Mapping[str, Any]) -> str:
    job = session.get("job")
    if not isinstance(job, dict):
        return ""
    place, name = job.get("module") or job.get("file") or "", job.get("name", "job")
    return str(place if name == "job" else f"{place}:{name}")


def _options(session: Mapping[str, Any]) -> dict[str, Any]:
    options = session.get("options")
    return options if isinstance(options, dict) else {}


def _state(session: Mapping[str, Any], folder: Path) -> str:
    state = session.get("state")
    if state not in (RUNNING, None):
        return words.line(str(state))
    return RUNNING if is_held(folder) else DIED


def _span(session: Mapping[str, Any]) -> float:
    began, ended = finite(session.get("began_at")), finite(session.get("ended_at"))
    return max(0.0, (ended or time.time()) - began) if began is not None else 0.0


def _snapshot(run: Reading) -> Snapshot | None:
    """The last one that was written; None, if this version does not understand it."""
    for (text,) in run.rows("live", "SELECT snapshot FROM live"):
        try:
            return decoded(text)
        except (msgspec.MsgspecError, TypeError):
            return None
    return None


def _nodes(run: Reading) -> list[NodeAccount]:
    found: dict[int, dict[str, Any]] = {}
    for node, metric, value, _ in run.rows("samples", LAST_OF_EACH):
        if metric in TOTALS and value is not None:
            found.setdefault(node, {})[metric] = value if metric.endswith("_s") else int(value)
    lives = run.rows("nodes", "SELECT node, name, host, min(joined_at), left_at, why FROM nodes GROUP BY node")
    for node, samples in run.rows("verified", "SELECT node, samples FROM verified"):
        found.setdefault(node, {})["verified_samples"] = samples
    nodes = []
    for node, name, host, joined_at, left_at, why in lives:
        totals = NodeTotals(node, words.line(name or ""), 0, **found.get(node, {}))
        totals.compression_ratio = totals.raw_bytes / max(totals.bytes_sent, 1) if totals.raw_bytes else 1.0
        nodes.append(NodeAccount(totals, words.line(host or ""), joined_at, left_at, words.line(why or "")))
    return nodes


def saved_sha256(folder: Path) -> str:
    """Of the weights, as the newest checkpoint says."""
    try:
        latest = (folder / "checkpoints" / "latest").read_text(encoding="utf-8").strip()
        state = json.loads((folder / "checkpoints" / Path(latest).name / "state.json").read_text(encoding="utf-8"))
        return words.line(str(state.get("sha256") or ""))
    except (OSError, ValueError, AttributeError):
        return ""
