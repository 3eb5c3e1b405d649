"""`lora`: what a large frozen part costs a pool of four nodes: in an update, a version, a checkpoint, in memory."""

from __future__ import annotations

import json
import os
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

JOB = Path(__file__).with_name("lora_job.py")
NODES, SECONDS, EVERY_S = 4, 20.0, 4.0


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"about {repeats * (SECONDS + 8) / 60:.0f} minutes")
    rows = []
    for i in range(repeats):
        rows.append(_once() | _of_a_version())
        say(f"round {i + 1}: " + ", ".join(f"{name} {value:.4g}" for name, value in rows[-1].items()))
    return {name: median(row[name] for row in rows) for name in rows[0]}


def _once() -> dict[str, float]:
    """One `wide run` that writes checkpoints and evaluates."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", str(JOB), "--nodes", str(NODES), "--log", "silent", "--json"]
        command += ["--seconds", str(SECONDS), "--checkpoint-every", str(EVERY_S), "--out", str(out)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        try:
            memory_mb = _coordinators_memory_mb(process)
            result = json.loads(process.communicate()[0])
        finally:
            process.kill()  # if we were stopped
        db = sqlite3.connect(out / "run.db")
        (updates,) = db.execute("SELECT count(*) FROM ledger").fetchone()
        seconds = [value for (value,) in db.execute("SELECT value FROM samples WHERE metric = 'checkpoint_s'")]
        db.close()
        files = {os.stat(file).st_ino: os.stat(file).st_size for file in out.glob("checkpoints/step-*/*.safetensors")}
    sent = sum(node["bytes_sent"] for node in result["nodes"])
    return {
        "batches_per_s": result["batches_per_s"],
        "sent_per_update": sent / updates,
        "checkpoint_s": median(seconds[1:]) if len(seconds) > 1 else float("nan"),
        "folder_mb": sum(files.values()) / 1e6,
        "coordinator_mb": memory_mb,
    }


def _coordinators_memory_mb(process: subprocess.Popen[bytes]) -> float:
    """The most that only it had, while it trained."""
    most = 0.0
    while process.poll() is None:
        time.sleep(0.5)
        try:
            family = psutil.Process(process.pid).children(recursive=True)
            coordinators = [child for child in family if len(child.children()) >= NODES]
            most = max([most, *(child.memory_full_info().uss / 1e6 for child in coordinators)])
        except psutil.NoSuchProcess:
            break
    return most


def _of_a_version() -> dict[str, float]:
    """What a node leaves in memory, or sends, for an update; and what is copied for nodes that are sent a version."""
    import torch

    from benchmarks.lora_job import job
    from wide.codec.encoders import Encoders
    from wide.coordinator.master import Master
    from wide.exchange.versions import Versions

    torch.set_num_threads(1)
    master = Master(job, job.model(), seed=0)
    versions = Versions(master.weights, master.layout, Encoders(threads=0))
    times = []
    for version in range(1, 9):
        began = time.perf_counter()
        versions.open(version, "raw", set)
        times.append(1000 * (time.perf_counter() - began))
    return {"update_nbytes": master.layout.live_nbytes, "version_copy_ms": median(times[2:])}
