"""`workers`: one node with and without two workers, alternating, where samples cost as much CPU as the model, or as
much waiting.
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

JOB = Path(__file__).with_name("workers_job.py")
WORKERS, STEPS, BATCH = 2, 15, 32


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
    return results


def _train(workers: int, cost: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:costly", "--nodes", "1", "--workers", str(workers)]
        command += ["--steps", str(STEPS), "--log", "silent", "--json", "--out", f"{folder}/run"]
        done = subprocess.run(command, stdout=subprocess.PIPE, env=os.environ | cost, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result
