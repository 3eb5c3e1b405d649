"""The verdict on a chaotic run: is every batch in the ledger once, and how long did merging pause after each fault?
Knows run.db, checkpoints and times; nothing of processes.

A pause is the time between two merges. It belongs to a fault if it overlaps the seconds after it (WINDOW_S) and
nothing that may take longer was going on meanwhile (BLURRED_BY), or had been until SETTLE_S before; else that fault is
not measured. Faults of a kind that may take as long do not excuse each other: a pause that several cuts made together
counts in full for each. What a killed coordinator costs is the time from SIGKILL to the next merge.
"""

from __future__ import annotations

import json
import math
import sqlite3
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

WINDOW_S = {"kill": 3.0, "leave": 3.0, "reset": 3.0, "cut": 10.0, "pause": 10.0, "slow": 10.0, "full": 5.0}
SLOWER = ("cut", "pause", "slow", "full", "coordinator")
BLURRED_BY = {
    "kill": SLOWER,
    "leave": SLOWER,
    "reset": SLOWER,
    "cut": ("full", "coordinator"),
    "pause": ("full", "coordinator"),
    "slow": ("full", "coordinator"),
    "full": ("coordinator",),
    "coordinator": ("full",),
}
SETTLE_S = 2.0


@dataclass
class Happened:
    """A fault, by the wall clock, as the ledger's times are."""

    kind: str
    began: float
    ended: float
    who: str = ""


class Ledger(NamedTuple):
    """What the newest checkpoint says, and what the ledger says about it."""

    steps: int
    batches: int
    sha256: str
    lost: int
    doubled: int


def read_ledger(run_dir: Path, batches_per_step: int, batches_per_epoch: int) -> Ledger:
    """All batches before the checkpoint's front, but for its holes, must be there once, and no others. Rows of later
    versions do not count: whoever resumes drops them.
    """
    folder = run_dir / "checkpoints"
    state: dict[str, Any] = json.loads((folder / (folder / "latest").read_text().strip() / "state.json").read_text())
    position = state["position"]
    times: Counter[int] = Counter()
    query = "SELECT step, first_batch, last_batch FROM ledger WHERE version <= ?"
    with closing(sqlite3.connect(run_dir / "run.db")) as db:
        for step, first, last in db.execute(query, (position["version"],)):
            if position["strategy"] == "sync":
                start = step * batches_per_step
            else:
                start = step * batches_per_step // batches_per_epoch * batches_per_epoch
            times.update(range(start + first, start + last + 1))
    expected = set(range(position["front"]))
    for first, end in position["holes"]:
        expected.difference_update(range(first, end))
    lost = sum(batch not in times for batch in expected)
    doubled = sum(count - (batch in expected) for batch, count in times.items())
    return Ledger(position["steps"], len(expected), state["sha256"], lost, doubled)


def recoveries(merges: Sequence[float], happened: Sequence[Happened]) -> dict[str, list[float]]:
    """How long merging paused after each fault that could be measured, by class. `merges` are sorted times."""
    blurs = [_blur(fault, merges) for fault in happened]
    found: dict[str, list[float]] = {kind: [] for kind in BLURRED_BY}
    for fault in happened:
        if fault.kind not in BLURRED_BY or (pause := _pause_after(fault, merges)) is None:
            continue
        began, ended = pause
        window = (min(began, fault.began), max(ended, fault.began + WINDOW_S.get(fault.kind, 0.0)))
        if not any(
            blur.kind in BLURRED_BY[fault.kind] and blur.began < window[1] and blur.ended > window[0] for blur in blurs
        ):
            found[fault.kind].append(ended - began)
    return found


def _pause_after(fault: Happened, merges: Sequence[float]) -> tuple[float, float] | None:
    """When the longest one began, and when it ended; None, if nothing was merged afterwards."""
    if fault.kind == "coordinator":
        i = bisect_right(merges, fault.began)
        return (fault.began, merges[i]) if i < len(merges) else None
    first = max(0, bisect_right(merges, fault.began) - 1)
    last = bisect_left(merges, fault.began + WINDOW_S[fault.kind])
    if not first < last < len(merges):
        return None
    pauses = zip(merges[first:last], merges[first + 1 : last + 1], strict=True)
    return max(pauses, key=lambda pause: pause[1] - pause[0])


def _blur(fault: Happened, merges: Sequence[float]) -> Happened:
    """For how long a fault may be what others' pauses come from."""
    ended = fault.ended
    if fault.kind == "coordinator":
        i = bisect_right(merges, fault.began)
        ended = merges[i] if i < len(merges) else math.inf
    return Happened(fault.kind, fault.began, ended + SETTLE_S)


def percentile_99(values: Sequence[float]) -> float | None:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1] if values else None
