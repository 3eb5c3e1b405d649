"""`loops`: loops of the user's own. What a pull loop costs, against the same job's loss; and a GAN under wide.local by
three nodes of which one is killed, against the same script by itself: how good it is, and what travels for each step.
"""

from __future__ import annotations

import json
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

HERE = Path(__file__).parent
JOB, GAN = HERE / "loops_job.py", HERE.parent / "examples" / "gan.py"
BY_ITSELF = f"""
import contextlib, runpy, types, wide
wide.local = lambda *a, **k: contextlib.nullcontext(types.SimpleNamespace(node=0))
runpy.run_path({str(GAN)!r}, run_name="__main__")
"""
SCORE = re.compile(r"-> distance ([\d.]+), critic right (\d+)%")
NODES = 3
KILL_AFTER = 30  # leases that were merged


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    rows = []
    for i in range(repeats):
        rows.append(_pulled() | _gan())
        say(f"round {i + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()))
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _pulled() -> dict[str, float]:
    speeds, hashes = {}, set()
    for name in ("plain", "job"):
        with tempfile.TemporaryDirectory() as folder:
            command = ("run", f"{JOB}:{name}", "--nodes", "2", "--out", f"{folder}/run", "--log", "silent", "--json")
            done = subprocess.run([sys.executable, "-m", "wide", *command], capture_output=True, check=True)
        result = json.loads(done.stdout)
        speeds[name] = result["batches_per_s"]
        hashes.add(result["weights_sha256"])
    return {
        "loss_batches_per_s": speeds["plain"],
        "pulled_batches_per_s": speeds["job"],
        "ratio": speeds["job"] / speeds["plain"],
        "same_bits": float(len(hashes) == 1),
    }


def _gan() -> dict[str, float]:
    alone = _score(subprocess.run([sys.executable, "-c", BY_ITSELF], capture_output=True, text=True, check=True).stdout)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = ("run", str(GAN), "--nodes", str(NODES), "--out", str(out), "--json")
        process = subprocess.Popen(
            [sys.executable, "-m", "wide", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            _kill_one(process, out)
            stdout, stderr = process.communicate()
        finally:
            process.terminate()
        result, pool = json.loads(stdout), _score(stderr)
    steps = sum(node["batches"] for node in result["nodes"])
    nbytes = sum(node["bytes_sent"] + node["bytes_received"] for node in result["nodes"])
    return {
        "gan_distance_alone": alone[0],
        "gan_distance_pool": pool[0],
        "gan_critic_alone": alone[1],
        "gan_critic_pool": pool[1],
        "gan_nodes": float(len(result["nodes"])),
        "gan_steps": float(steps),
        "gan_bytes_per_step": nbytes / steps,
    }


def _kill_one(process: subprocess.Popen[str], out: Path) -> None:
    """The last of the nodes, in the middle; the first one prints what came of it."""
    while process.poll() is None and _leases(out) < KILL_AFTER:
        time.sleep(0.05)
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        nodes = next(found for member in family if len(found := member.children()) == NODES)
        nodes[-1].kill()


def _leases(out: Path) -> int:
    try:
        with sqlite3.connect(f"file:{out / 'run.db'}?mode=ro", uri=True) as db:
            return int(db.execute("SELECT count(*) FROM ledger").fetchone()[0])
    except sqlite3.OperationalError:
        return 0


def _score(text: str) -> tuple[float, float]:
    found = SCORE.search(text)
    assert found is not None, text
    return float(found[1]), float(found[2]) / 100
