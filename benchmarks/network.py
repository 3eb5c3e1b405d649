"""`network`: 1.13 M parameters on four hosts with 100 Mbit/s each: `--strategy auto` against PyTorch's DDP over Gloo.

What counts is the time to a held-out loss, from the first batch on, with all programs loaded before. The coordinator
has a host, and 100 Mbit/s, of its own. `wide plan` is asked while the pool trains, and what it says is compared with
what follows.
"""

from __future__ import annotations

import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import ddp
from benchmarks.namespaces import Host, hosts, why_not
from benchmarks.pools import WIDE, Served

MBIT = 100.0
NODES = 4
TARGET = 0.16  # of the held-out loss; it ends at about 0.12
SECONDS = 30.0
LIMIT_S = 240.0
JOB = "benchmarks/network_job.py"


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    if problem := why_not():
        raise SystemExit(problem)
    rounds: list[dict[str, Any]] = []
    with hosts([MBIT] * (NODES + 1)) as (here, *there):
        for i in range(repeats):
            found: dict[str, Any] = {"wide": pool(here, there)}
            for hook in ddp.HOOKS:
                found[hook] = ddp.train(there, hook, TARGET, LIMIT_S)
            rounds.append(found)
            ours = found["wide"]
            say(
                f"round {i + 1}: {ours['strategy']} {ours['batches_per_s']:.0f} batches/s (planned "
                f"{ours['planned']:.0f}), there in {ours['reached_s']:.1f} s; "
                + " · ".join(f"DDP {h} {found[h]['batches_per_s']:.1f}, {found[h]['reached_s']} s" for h in ddp.HOOKS)
            )

    def speedup(hook: str) -> float:
        return float(median((r[hook]["reached_s"] or LIMIT_S) / r["wide"]["reached_s"] for r in rounds))

    return {
        "mbit": MBIT,
        "speedup_ddp": speedup("none"),
        "speedup_ddp_fp16": speedup("fp16"),
        "speedup_ddp_powersgd": speedup("powersgd"),
        "utilisation": median(r["wide"]["batches_per_s"] / r["wide"]["own_speed"] for r in rounds),
        "plan_error": median(abs(r["wide"]["planned"] / r["wide"]["batches_per_s"] - 1) for r in rounds),
        "batches_per_s": {
            "wide": median(r["wide"]["batches_per_s"] for r in rounds),
            **{f"ddp_{hook}": median(r[hook]["batches_per_s"] for r in rounds) for hook in ddp.HOOKS},
        },
        "target": TARGET,
        "curves": {name: rounds[0][name]["curve"] for name in ("wide", *ddp.HOOKS)},
    }


def pool(here: Host, nodes: list[Host]) -> dict[str, Any]:
    """A coordinator here, a node on each of the others, and a question to the coordinator while they train."""
    options = ("--strategy", "auto", "--seconds", str(SECONDS))
    with tempfile.TemporaryDirectory() as folder, closing(Served(folder, here, JOB, *options)) as served:
        _until(lambda: _asked(served, here)[0] == 75)
        ready = [Path(folder) / f"ready-{i}" for i in range(len(nodes))]
        for host, file in zip(nodes, ready, strict=True):
            served.start(
                [*host.prefix, sys.executable, "-m", "benchmarks.joiner", str(file), f"{folder}/go", *served.how(JOB)]
            )
        _until(lambda: all(file.exists() for file in ready))
        (Path(folder) / "go").touch()
        time.sleep(SECONDS / 3)  # asking takes some of the cores that the nodes share
        _until(lambda: _asked(served, here)[0] == 0)
        plan, planned_at = _asked(served, here)[1], time.time()
        result = served.result()
        with closing(sqlite3.connect(f"{folder}/run/run.db")) as db:
            return _summary(result, plan, planned_at, db)


def _summary(result: dict[str, Any], plan: dict[str, Any], planned_at: float, db: sqlite3.Connection) -> dict[str, Any]:
    (began,) = db.execute("SELECT merged_at - seconds FROM steps ORDER BY step LIMIT 1").fetchone()
    found = db.execute("SELECT at - ?, value FROM evaluations WHERE metric='held_out_loss' ORDER BY at", (began,))
    curve = [(at, value) for at, value in found]
    later = "SELECT sum(last_batch - first_batch + 1), max(committed_at) - ? FROM ledger WHERE committed_at > ?"
    batches, seconds = db.execute(later, (planned_at, planned_at)).fetchone()
    return {
        "strategy": result["strategy"],
        "batches_per_s": batches / seconds,
        "reached_s": next((at for at, loss in curve if loss <= TARGET), LIMIT_S),
        "planned": plan["batches_per_s"],
        "own_speed": sum(node["batches_per_s"] for node in plan["nodes"]),
        "curve": curve,
    }


def _asked(served: Served, here: Host) -> tuple[int, dict[str, Any]]:
    return served.asked([*here.prefix, *WIDE, "plan", f"@{served.folder}/run/invite", "--json"])


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit("the pool did not come up in time")
        time.sleep(0.5)
