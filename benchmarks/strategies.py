"""`strategies`: sync, async and local on equal samples with four nodes, and with one of four nodes four times slower.

The held-out loss at the end, for three seeds; and, for the unequal nodes, the pool's batches/s against the sum of the
nodes' own speeds while they compute.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import mean, median
from typing import Any

STRATEGIES = ("sync", "async", "local")
JOBS = ("digits", "chargpt")
SEEDS = (0, 1, 2)
NODES = 4
SECONDS = 8.0
ROOT = Path(__file__).parents[1]


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    speeds: dict[str, list[float]] = {name: [] for name in STRATEGIES}
    for _ in range(repeats):
        for name in STRATEGIES:
            speeds[name].append(_unequal(name))
        say("one node four times slower: " + " · ".join(f"{name} {speeds[name][-1]:.3f}" for name in STRATEGIES))
    losses: dict[str, dict[str, list[float]]] = {job: {name: [] for name in STRATEGIES} for job in JOBS}
    curves: dict[str, dict[str, Any]] = {job: {} for job in JOBS}
    for job in JOBS:
        for seed in SEEDS:
            for name in STRATEGIES:
                result = wide(job, name, "--seed", str(seed))
                losses[job][name].append(result["metrics"]["held_out_loss"])
                if seed == SEEDS[0]:
                    curves[job][name] = result["curve"]
            say(f"{job}, seed {seed}: " + " · ".join(f"{name} {losses[job][name][-1]:.4f}" for name in STRATEGIES))
    ratios = {
        name: {job: mean(losses[job][name]) / mean(losses[job]["sync"]) for job in JOBS} for name in STRATEGIES[1:]
    }
    say("held-out loss against sync's: " + json.dumps(ratios))
    return {
        "loss_ratio": {name: max(of_jobs.values()) for name, of_jobs in ratios.items()},
        "loss_ratio_by_job": ratios,
        "held_out_loss": losses,
        "slow_node": {name: median(values) for name, values in speeds.items()},
        "curves": curves,
    }


def wide(job: str, strategy: str, *options: str) -> dict[str, Any]:
    """One run of a job of strategy_jobs.py: its result, with a curve of (samples, seconds, training loss)."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "WIDE_BENCHMARK_MARK": f"{folder}/slow"}
        command = [sys.executable, "-m", "wide", "run", f"benchmarks/strategy_jobs.py:{job}", "--nodes", str(NODES)]
        command += ["--strategy", strategy, "--json", "--log", "silent", "--out", f"{folder}/run", *options]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, Any] = json.loads(done.stdout)
        with closing(sqlite3.connect(f"{folder}/run/run.db")) as db:
            rows = db.execute(
                "SELECT samples, merged_at - seconds, merged_at, loss FROM steps ORDER BY step"
            ).fetchall()
    samples, began = 0, rows[0][1]
    result["curve"] = []
    for more, _, at, loss in rows:
        samples += more
        result["curve"].append((samples, at - began, loss))
    return result


def _unequal(strategy: str) -> float:
    result = wide("unequal", strategy, "--seconds", str(SECONDS))
    own: float = sum(node["batches"] / node["compute_s"] for node in result["nodes"])
    return float(result["batches_per_s"]) / own
