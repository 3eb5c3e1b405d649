"""`checkpoints`: what a checkpoint every 5 s costs, for a model that is all overhead and for one of 1.13 M numbers."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
JOBS = {"seed": f"{HERE / 'seed_job.py'}:forty", "wide": str(HERE / "wide_job.py")}
NODES = 4
SECONDS = 16.0  # three checkpoints, and one at the end on both sides
EVERY_S, NEVER_S = 5.0, 1e9


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Batches/s with them ÷ without, medians over rounds that alternate the sides."""
    ratios: dict[str, list[float]] = {name: [] for name in JOBS}
    for i in range(repeats):
        for name, job in JOBS.items():
            order = (EVERY_S, NEVER_S) if i % 2 else (NEVER_S, EVERY_S)
            rates = {every_s: _batches_per_s(job, every_s) for every_s in order}
            ratios[name].append(rates[EVERY_S] / rates[NEVER_S])
            say(f"round {i + 1}, {name}: {rates[EVERY_S]:.0f} batches/s with, {rates[NEVER_S]:.0f} without")
    result = {name: median(values) for name, values in ratios.items()}
    say(" · ".join(f"{name} {ratio:.3f}" for name, ratio in result.items()))
    return {"every_s": EVERY_S, "ratio": result, "ratios": ratios}


def _batches_per_s(job: str, every_s: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "wide", "run", job, "--nodes", str(NODES), "--log", "silent", "--json"]
        command += ["--seconds", str(SECONDS), "--checkpoint-every", str(every_s), "--out", str(Path(folder) / "run")]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=HERE.parent)
    batches_per_s: float = json.loads(done.stdout)["batches_per_s"]
    return batches_per_s
