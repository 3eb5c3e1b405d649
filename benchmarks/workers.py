"""`workers`: one node with and without two workers, alternating, where samples cost as much CPU as the model, or as
much waiting; and what 400 MB of data cost ten nodes in memory, as a multiple of one copy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.seed import watch_memory

JOB = Path(__file__).with_name("workers_job.py")
WORKERS, STEPS, BATCH = 2, 15, 32
NODES, DATA_MB = 10, 400
OPTIONS = ["--nodes", str(NODES), "--seconds", "6", "--no-check"]
SCRIPT = "from benchmarks.workers_job import captured; import wide; "
COMMANDS = {
    "dataset()": ["-m", "wide", "run", f"{JOB}:heavy", *OPTIONS],
    "script": ["-c", f"{SCRIPT} wide.run(captured(), nodes={NODES}, seconds=6, check=False)"],
}


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    batch_s = 1 / _train(0, {})["batches_per_s"]
    say(f"a batch of the model: {1000 * batch_s:.1f} ms; so much CPU, or waiting, for its samples too")
    results: dict[str, Any] = {"model_ms": 1000 * batch_s}
    for case, variable in (("cpu", "SAMPLE_CPU_S"), ("wait", "SAMPLE_WAIT_S")):
        cost = {variable: str(batch_s / BATCH)}
        ratios, are_equal = [], True
        for i in range(repeats):
            without, with_them = _train(0, cost), _train(WORKERS, cost)
            ratios.append(with_them["batches_per_s"] / without["batches_per_s"])
            are_equal = are_equal and with_them["weights_sha256"] == without["weights_sha256"]
            say(
                f"{case}, round {i + 1}: {without['batches_per_s']:.0f} batches/s without, "
                f"{with_them['batches_per_s']:.0f} with {WORKERS} workers, ratio {ratios[-1]:.2f}, "
                f"{'same' if are_equal else 'OTHER'} weights"
            )
        results |= {f"{case}_ratio": median(ratios), f"{case}_are_equal": are_equal}
    for origin, command in COMMANDS.items():
        results[f"{origin}_copies"] = (_most_mb(command, DATA_MB) - _most_mb(command, 1)) / (DATA_MB - 1)
        say(f"{NODES} nodes, {DATA_MB} MB made by {origin}: {results[f'{origin}_copies']:.2f} copies in memory")
    return results


def _most_mb(command: list[str], data_mb: int) -> float:
    """The largest sum of PSS over a run's processes: that which started it, too."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen([sys.executable, *command], cwd=folder, env=_environment(DATA_MB=str(data_mb)))
        try:
            return watch_memory(process)
        finally:
            process.kill()  # if we were stopped


def _environment(**more: str) -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(JOB.parents[1]), "WIDE_LOG": "silent"} | more


def _train(workers: int, cost: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:costly", "--nodes", "1", "--workers", str(workers)]
        command += ["--steps", str(STEPS), "--log", "silent", "--json", "--out", f"{folder}/run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=_environment(**cost), check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result
