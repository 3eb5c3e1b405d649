"""`door`: what callers who should not get in cost a pool that trains: eight nodes on the seeds' workload, an update per
40 batches. Each kind of attack in turn, then all but TLS at once; calm phases between them. The attackers run on the
same cores, and what they compute themselves is part of what is measured.
"""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.attackers import KINDS

NODES = 8
PHASE_S, SETTLE_S = 20.0, 2.0
JOB = Path(__file__).with_name("seed_job.py")


def run(repeats: int, say: Callable[[str], None], seconds: float = PHASE_S) -> dict[str, Any]:
    phases = [*([kind] for kind in KINDS), [kind for kind in KINDS if kind != "tls"]]
    say(f"about {repeats * len(phases) * 2 * (seconds + SETTLE_S) / 60 + 0.5:.0f} minutes")
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        pool = Pool(Path(folder), stack)
        for i in range(repeats):
            before = pool.speed(seconds)
            for kinds in phases:
                attackers = [pool.attack(kind, seconds + SETTLE_S) for kind in kinds]
                attacked = pool.speed(seconds)
                done = [int(attacker.communicate()[0]) for attacker in attackers]
                after = pool.speed(seconds)
                name = kinds[0] if len(kinds) == 1 else "all"
                ratios.setdefault(name, []).append(2 * attacked / (before + after))
                say(f"round {i + 1}, {name} {done}: {ratios[name][-1]:.3f} of {(before + after) / 2:.0f} batches/s")
                before = after
        memory_mb, db_mb, rows = pool.growth()
    say(f"memory +{memory_mb:.0f} MB, run.db +{db_mb:.2f} MB for refusals ({rows} rows)")
    worst = {name: median(values) for name, values in ratios.items()}
    return {"ratios": worst, "worst": min(worst.values()), "memory_mb": memory_mb, "db_mb": db_mb, "reject_rows": rows}


class Pool:
    """A pool that others could join, and does not need them."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._db, self._stack = folder / "run" / "run.db", stack
        command = [sys.executable, "-m", "wide", "serve", f"{JOB}:forty", "--nodes", str(NODES), "--port", "0"]
        command += ["--log", "silent", "--out", str(folder / "run")]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        stack.callback(self._end)
        assert self._process.stderr is not None
        found = next(found for line in self._process.stderr if (found := re.match(r"pool .*:(\d+), TLS", line)))
        self._port = found[1]
        while not self._db.exists() or not self._ask("SELECT count(*) FROM steps"):
            time.sleep(0.2)
        time.sleep(SETTLE_S)
        self._rss, self._most = self._memory(), 0.0

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _ask(self, query: str, *values: float) -> Any:
        with contextlib.closing(sqlite3.connect(self._db)) as db:
            return db.execute(query, values).fetchone()[0]

    def _memory(self) -> float:
        return float(psutil.Process(self._process.pid).memory_info().rss)

    def speed(self, seconds: float) -> float:
        """Batches a second, from now on."""
        time.sleep(SETTLE_S)
        began, self._most = time.time(), max(self._most, self._memory())
        time.sleep(seconds)
        self._most = max(self._most, self._memory())
        steps = self._ask("SELECT count(*) FROM steps WHERE merged_at BETWEEN ? AND ?", began, time.time())
        return float(40 * steps / (time.time() - began))

    def attack(self, kind: str, seconds: float) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "benchmarks.attackers", kind, self._port, str(seconds)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
        self._stack.callback(process.kill)
        return process

    def growth(self) -> tuple[float, float, int]:
        """Of memory, and of what run.db holds because of strangers: rows, and their text."""
        rows = self._ask("SELECT count(*) FROM rejects")
        nbytes = self._ask("SELECT coalesce(sum(length(reason) + length(detail) + 32), 0) FROM rejects")
        return (self._most - self._rss) / 1e6, nbytes / 1e6, rows
