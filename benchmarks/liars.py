"""`liars`: what one lying node of four does to a pool that learns digits, for each strategy and each kind of lie
(faults/lies.py).

Is 95 % reached, does the coordinator live, is the liar named, after how many of its leases, and is anybody else? In
`sync`: are the weights those of `--nodes 0`? With --detection, --throughput or --honest N: what liars_measured.py says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.liars_measured import detection as detected
from benchmarks.liars_measured import honest_runs, speeds
from benchmarks.liars_pool import JOBS, ROOT, Outcome, Pool
from faults.lies import KINDS

STRATEGIES = ("sync", "async", "local")
NOBODY = "none"  # four honest nodes: what the others are compared with
ENOUGH = 0.95
HONEST = 3
SHARES = {"bitflip": 0.1}  # one in a hundred would often be none, in so short a run
HEAD = (
    f"{'':6s}{'lie':13s}{'accuracy':>9s}  {'exact':6s}{'known as':12s}{'leases':>7s}{'lies':>5s}{'merged':>7s}  "
    f"{'exit':5s}words"
)

Say = Callable[[str], None]


def run(
    repeats: int,
    say: Say,
    strategies: str = "",
    kinds: str = "",
    seeds: int = 1,
    audit: float | None = None,
    honest: int = 0,
    against: str = "",
    detection: bool = False,
    throughput: bool = False,
) -> dict[str, Any]:
    """The table, unless other parts are asked for."""
    names = _chosen(strategies, STRATEGIES)
    parts: dict[str, Any] = {}
    if detection:
        parts["detection"] = detected(repeats, say)
    if throughput:
        parts["throughput"] = speeds(repeats, say, against)
    if honest:
        parts["honest"] = honest_runs(honest, names, say, audit)
    return parts or _table(names, _chosen(kinds, (NOBODY, *KINDS)), seeds, audit, say)


def _chosen(asked: str, known: tuple[str, ...]) -> list[str]:
    chosen = asked.split(",") if asked else list(known)
    if unknown := set(chosen).difference(known):
        raise SystemExit(f"there is no {', '.join(sorted(unknown))} here, only {', '.join(known)}")
    return chosen


def _table(strategies: list[str], kinds: list[str], seeds: int, audit: float | None, say: Say) -> dict[str, Any]:
    rows = []
    say(HEAD)
    for seed in range(seeds):
        exact = (
            {job: _alone(job, seed) for job in sorted({_job(kind) for kind in kinds})} if "sync" in strategies else {}
        )
        for strategy in strategies:
            for kind in kinds:
                outcome = _one(strategy, kind, seed, audit)
                is_exact = outcome.result.get("weights_sha256") == exact[_job(kind)] if strategy == "sync" else None
                rows.append(_row(strategy, kind, seed, outcome, is_exact))
                say(_line(rows[-1]))
    lied_to = [row for row in rows if row["kind"] != NOBODY]
    return {
        "runs": len(lied_to),
        "reached": sum((row["accuracy"] or 0.0) >= ENOUGH for row in lied_to),
        "named": sum(row["known_as"] == "named" for row in lied_to),
        "lived": sum(row["code"] == 0 for row in lied_to),
        "wronged": sum(len(row["wronged"]) for row in rows),
        "exact": sum(row["is_exact"] is True for row in lied_to),
        "rows": rows,
    }


def _job(kind: str) -> str:
    return "normed" if kind == "buffers" else "digits"


def _one(strategy: str, kind: str, seed: int, audit: float | None) -> Outcome:
    options = ["--strategy", strategy, "--seed", str(seed)]
    options += ["--audit", str(audit)] if audit is not None else []
    with tempfile.TemporaryDirectory() as folder, Pool(folder, f"{JOBS}:{_job(kind)}", *options) as pool:
        if kind != NOBODY:
            pool.lie(kind, seed, SHARES.get(kind))
        for number in range(HONEST + (kind == NOBODY)):
            pool.join(f"honest-{number + 1}")
        outcome = pool.outcome()
        outcome.words = outcome.words or (pool.said() if outcome.code else "")
        return outcome


def _alone(job: str, seed: int) -> str:
    """What `--nodes 0` makes of it."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "wide", "run", f"{JOBS}:{job}", "--nodes", "0", "--seed", str(seed)]
        command += ["--json", "--log", "silent", "--out", f"{folder}/run"]
        at_once = os.environ | {"WIDE_BENCHMARK_SLOWER": "0"}
        done = subprocess.run(command, cwd=ROOT, env=at_once, stdout=subprocess.PIPE, text=True, check=True)
    return str(json.loads(done.stdout)["weights_sha256"])


def _row(strategy: str, kind: str, seed: int, outcome: Outcome, is_exact: bool | None) -> dict[str, Any]:
    return {
        "strategy": strategy,
        "kind": kind,
        "seed": seed,
        "accuracy": outcome.accuracy,
        "is_exact": is_exact,
        "known_as": outcome.known_as,
        "leases": outcome.leases,
        "lies": outcome.lies,
        "merged": outcome.merged,
        "wronged": outcome.wronged,
        "code": outcome.code,
        "words": outcome.words or outcome.left,
        "seconds": round(outcome.seconds, 1),
    }


def _line(row: dict[str, Any]) -> str:
    accuracy = f"{row['accuracy']:.3f}" if row["accuracy"] is not None else "–"
    exact = {True: "yes", False: "no", None: ""}[row["is_exact"]]
    code = "hung" if row["code"] is None else str(row["code"])
    wronged = f"WRONGED {', '.join(row['wronged'])}; " if row["wronged"] else ""
    words = " ".join(row["words"].split())[:90]
    return (
        f"{row['strategy']:6s}{row['kind']:13s}{accuracy:>9s}  {exact:6s}{row['known_as'] or '–':12s}"
        f"{row['leases']:>7d}{row['lies']:>5d}{row['merged']:>7d}  {code:5s}{wronged}{words}"
    )
