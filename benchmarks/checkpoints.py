"""`checkpoints`: what a checkpoint every 5 s costs, for a model that is all overhead and for one of 1.13 M numbers.

Two runs of the same pool differ by more than that on a shared machine. So one run is compared with itself: how much is
merged in the second after each checkpoint was begun, and how much in the others.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
JOBS = {"seed": f"{HERE / 'seed_job.py'}:forty", "wide": str(HERE / "wide_job.py")}
NODES = 4
SECONDS = 61.0
EVERY_S = 5.0
AFTER_S = 1.0  # in which a checkpoint of this size is copied, written and synced


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Batches/s of all the time ÷ that of the time without checkpoints; medians."""
    ratios: dict[str, list[float]] = {name: [] for name in JOBS}
    for i in range(repeats):
        for name, job in JOBS.items():
            during, beside, count = _rates(job)
            share = AFTER_S / EVERY_S
            ratios[name].append((share * during + (1 - share) * beside) / beside)
            say(f"round {i + 1}, {name}: {during:.0f} steps/s during {count} checkpoints, {beside:.0f} beside them")
    result = {name: median(values) for name, values in ratios.items()}
    say(" · ".join(f"{name} {ratio:.3f}" for name, ratio in result.items()))
    return {"every_s": EVERY_S, "ratio": result, "ratios": ratios}


def _rates(job: str) -> tuple[float, float, int]:
    """Steps/s in the second after a checkpoint was begun, and otherwise; and how many checkpoints there were."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", job, "--nodes", str(NODES), "--log", "silent", "--json"]
        command += ["--seconds", str(SECONDS), "--checkpoint-every", str(EVERY_S), "--out", str(run_dir)]
        subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=HERE.parent)
        with closing(sqlite3.connect(run_dir / "run.db")) as db:
            merged = [at for (at,) in db.execute("SELECT merged_at FROM steps ORDER BY merged_at")]
            begun = [at for (at,) in db.execute("SELECT at FROM samples WHERE metric = 'synced' ORDER BY at")]
    begun = [at for at in begun if merged[0] + AFTER_S < at < merged[-1] - AFTER_S]  # not the last one
    first, last = begun[0], begun[-1] + AFTER_S
    during = sum(bisect_right(merged, at + AFTER_S) - bisect_right(merged, at) for at in begun)
    beside = bisect_right(merged, last) - bisect_right(merged, first) - during
    during_s = AFTER_S * len(begun)
    return during / during_s, beside / (last - first - during_s), len(begun)
