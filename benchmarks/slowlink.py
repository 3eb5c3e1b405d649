"""`slowlink`: one node behind 20 Mbit/s, 1.13 M parameters, synchronous: what each `--compress` makes of it.

The first step, in which nothing is known of the node and it is given one batch, is left out. Then the digits over
the same link with `--compress auto`, to the example's end.
"""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.namespaces import Host, hosts, why_not

MBIT = 20.0
SECONDS = 20.0
ROOT = Path(__file__).parents[1]
WISHES = ("none", "lossless", "auto")


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    if problem := why_not():
        raise SystemExit(problem)
    rates: dict[str, list[float]] = {wish: [] for wish in WISHES}
    with hosts([None, MBIT]) as (here, there):
        for i in range(repeats):
            for wish in WISHES:
                result = pool(here, [there], "benchmarks/wide_job.py", wish, "--seconds", str(SECONDS))
                rates[wish].append(1 / mean(result["step_seconds"][1:]))
            say(f"round {i + 1}, steps/s: " + " · ".join(f"{wish} {rates[wish][-1]:.2f}" for wish in WISHES))
        digits = pool(here, [there], "examples/digits.py", "auto")
    say(f"digits with --compress auto: accuracy {digits['metrics']['accuracy']:.3f}")
    return {
        "mbit": MBIT,
        "steps_per_s": {wish: median(values) for wish, values in rates.items()},
        "lossless": median(a / b for a, b in zip(rates["lossless"], rates["none"], strict=True)),
        "auto": median(a / b for a, b in zip(rates["auto"], rates["none"], strict=True)),
        "digits_accuracy": digits["metrics"]["accuracy"],
    }


def pool(here: Host, nodes: list[Host], job: str, compress: str, *options: str) -> dict[str, Any]:
    """A coordinator here, a node on each of the others; the coordinator's result."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"WIDE_TOKEN": secrets.token_hex(8), "PYTHONPATH": str(ROOT), "WIDE_LOG": "silent"}
        address = (here.address, "9433")
        wide = [sys.executable, "-m", "wide"]
        serve = [*here.prefix, *wide, "serve", job, "--host", address[0], "--port", address[1], "--insecure", "--json"]
        serve += ["--compress", compress, "--out", f"{folder}/run", *options]
        coordinator = subprocess.Popen(
            serve, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        joined = []
        assert coordinator.stderr is not None
        for line in coordinator.stderr:
            if "wide join" in line:
                break
        for host in nodes:
            join = [*host.prefix, *wide, "join", ":".join(address), "--job", job, "--log", "silent"]
            joined.append(subprocess.Popen(join, cwd=ROOT, env=environment))
        output, errors = coordinator.communicate()
        for process in joined:
            process.wait()
        if coordinator.returncode:
            raise SystemExit(f"wide serve failed with {coordinator.returncode}: {errors}")
        result: dict[str, Any] = json.loads(output)
        with closing(sqlite3.connect(f"{folder}/run/run.db")) as db:
            result["step_seconds"] = [seconds for (seconds,) in db.execute("SELECT seconds FROM steps ORDER BY step")]
        return result
