"""`logging`: the seeds' study of what the three tiers of log cost: one pool, silent, normal and verbose in turn."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

JOB = Path(__file__).with_name("seed_job.py")
TIERS = ("silent", "normal", "verbose")
NODES = 4
SECONDS = 4.0


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Batches/s of each tier, and ÷ silent's of the same round; medians."""
    rounds: list[dict[str, float]] = []
    for i in range(repeats):
        order = TIERS if i % 2 else TIERS[::-1]
        rounds.append({tier: _batches_per_s(tier) for tier in order})
        say(f"round {i + 1}: " + ", ".join(f"{tier} {rounds[-1][tier]:.0f} batches/s" for tier in TIERS))
    result: dict[str, Any] = {f"{tier}_batches_per_s": median(r[tier] for r in rounds) for tier in TIERS}
    result |= {tier: median(r[tier] / r["silent"] for r in rounds) for tier in TIERS[1:]}
    say(f"normal {result['normal']:.2f} of silent, verbose {result['verbose']:.2f}")
    return result


def _batches_per_s(tier: str) -> float:
    """One `wide run`; what it says goes into a file, as a user who keeps it would do."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "stderr", "w") as words:
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:ten", "--nodes", str(NODES), "--log", tier]
        command += ["--seconds", str(SECONDS), "--json", "--out", str(Path(folder) / "run")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=words, check=True)
    batches_per_s: float = json.loads(done.stdout)["batches_per_s"]
    return batches_per_s
