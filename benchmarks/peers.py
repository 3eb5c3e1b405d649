"""`peers`: the pool, PyTorch's DDP and other frameworks that train one model in several processes, on one machine; all
alternate in one run.

Each framework has an environment of its own, which `make peers` makes: .peers/NAME. Those that are not there, or cannot
do it here, are named and left out.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.host import Case, ceiling, ddp, pool

NAMES = ("torchft", "ray", "flower", "hivemind")
CASE = Case("small", 4, 4, 4.0)
START_S = 20.0  # about, until a framework's workers have found each other
TIMEOUT_S = 120.0
ROOT = Path(__file__).resolve().parent.parent


class CannotRun(Exception):
    """This framework does not do it here, and why."""


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Medians of batches/s, and of how many times a peer's the pool's are."""
    present = [name for name in NAMES if _python(name).exists()]
    for name in NAMES:
        if name not in present:
            say(f"{name} is not installed: make peers")
    duration_s = repeats * (3 * (CASE.seconds + 7) + len(present) * (CASE.seconds + START_S))
    say(f"about {duration_s / 60:.0f} minutes")
    rows: list[dict[str, float]] = []
    for i in range(repeats):
        row = {"ceiling": ceiling(CASE), "wide": pool(CASE)[0], "ddp": ddp(CASE)}
        for name in tuple(present):
            try:
                row[name] = _peer(name)
            except CannotRun as error:
                present.remove(name)
                say(f"{name} is left out: {error}")
        rows.append(row)
        say(f"round {i + 1}, batches/s: " + ", ".join(f"{name} {rate:.4g}" for name, rate in row.items()))
    return _summary(rows, ["ddp", *present])


def _summary(rows: list[dict[str, float]], peers: list[str]) -> dict[str, Any]:
    medians = {name: median(row[name] for row in rows) for name in ("ceiling", "wide", *peers)}
    ratios = {name: median(row["wide"] / row[name] for row in rows) for name in peers}
    return {"workload": f"{CASE} batches", **medians, "wide_vs": ratios}


def _peer(name: str) -> float:
    """Batches/s of one framework, in a process that ends all those it starts."""
    command = [str(_python(name)), "-m", f"benchmarks.peer_{name}", str(CASE.seconds), str(CASE.nodes)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            output, errors = process.communicate(timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise CannotRun(f"no result after {TIMEOUT_S:.0f} s") from None
        finally:
            process.terminate()
    if process.returncode:
        raise CannotRun((errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1])
    rate: float = json.loads(output.splitlines()[-1])["batches_per_s"]
    return rate


def _python(name: str) -> Path:
    return ROOT / ".peers" / name / "bin" / "python"
