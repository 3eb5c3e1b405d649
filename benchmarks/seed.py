"""`seed`: the pool against compute-only processes on the ancestor's workload, ten of each, alternating in one run."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.together import Counts, together

NODES = 10
PRELOAD = "benchmarks.seed_job"
CEILING_S = 2.0
POOL_S = 5.0
JOB = Path(__file__).with_name("seed_job.py")


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Ceiling, pool with an update per 10, ceiling, pool with an update per 40, and again; medians of the ratios."""
    rounds = []
    top = ceiling()
    for i in range(repeats):
        ten = pool("ten")
        middle = ceiling()
        forty = pool("forty")
        before, top = top, ceiling()
        ten["ratio"] = 2 * ten["batches_per_s"] / (before + middle)
        forty["ratio"] = 2 * forty["batches_per_s"] / (middle + top)
        rounds.append((middle, ten, forty))
        say(
            f"round {i + 1}: ceiling {middle:5.0f} batches/s · an update per 10: {ten['batches_per_s']:5.0f}, "
            f"ratio {ten['ratio']:.2f} · per 40: {forty['batches_per_s']:5.0f}, ratio {forty['ratio']:.2f} · "
            f"{ten['pss_mb']:.0f} MB · first update after {ten['first_update_s']:.2f} s · "
            f"loss {ten['loss_first']:.3f} → {ten['loss_last']:.3f}"
        )
    return {
        "ceiling_batches_per_s": median(middle for middle, _, _ in rounds),
        "pool_batches_per_s": median(ten["batches_per_s"] for _, ten, _ in rounds),
        "ratio": median(ten["ratio"] for _, ten, _ in rounds),
        "ratio_40": median(forty["ratio"] for _, _, forty in rounds),
        "pss_mb": max(ten["pss_mb"] for _, ten, _ in rounds),
        "first_update_s": median(ten["first_update_s"] for _, ten, _ in rounds),
        "loss_first": rounds[-1][1]["loss_first"],
        "loss_last": rounds[-1][1]["loss_last"],
    }


def ceiling() -> float:
    """Batches per second of ten processes that draw batches, compute and never talk: a plain PyTorch loop."""
    return together(NODES, PRELOAD, _compute)


def _compute(rank: int, barrier: Barrier, counts: Counts) -> None:
    import torch
    from torch import nn

    from benchmarks import seed_job

    torch.set_num_threads(1)
    model, loss = seed_job.model(), nn.CrossEntropyLoss()
    points, labels = seed_job.labelled_points().tensors
    batches = torch.split(torch.randperm(len(points)), 32)
    barrier.wait()
    done, start = 0, time.perf_counter()
    while time.perf_counter() - start < CEILING_S:
        ids = batches[done % len(batches)]
        model.zero_grad()
        loss(model(points[ids]), labels[ids]).backward()
        done += 1
    counts.put(done / (time.perf_counter() - start))


def pool(job: str) -> dict[str, float]:
    """One `wide run` as a user would start it; memory is read while it trains, the first update from its run.db."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:{job}", "--nodes", str(NODES), "--log", "silent"]
        command += ["--seconds", str(POOL_S), "--json", "--out", str(out)]
        started_at = time.time()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"WIDE_LOG": ""})
        try:
            pss_mb = watch_memory(process)
            output = process.communicate()[0]
        finally:
            process.kill()  # if we were stopped
        if process.returncode:
            raise SystemExit(f"wide run failed with {process.returncode}")
        result: dict[str, Any] = json.loads(output)
        (first,) = sqlite3.connect(out / "run.db").execute("SELECT min(merged_at) FROM steps").fetchone()
    return {
        "batches_per_s": result["batches_per_s"],
        "loss_first": result["loss_first"],
        "loss_last": result["loss_last"],
        "pss_mb": pss_mb,
        "first_update_s": first - started_at,
    }


def watch_memory(process: subprocess.Popen[bytes]) -> float:
    """The largest sum of PSS over the process and all it started, read once a second."""
    most = 0.0
    while process.poll() is None:
        time.sleep(1.0)
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            most = max(most, sum(member.memory_full_info().pss for member in family) / 1e6)
        except psutil.NoSuchProcess:
            break
    return most
