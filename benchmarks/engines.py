"""`engines`: what Ray costs, against `wide run` with as many nodes on the same machine, and against nodes that somebody
has joined by hand: those talk as Ray's nodes do, by TLS over TCP, where `wide run` shares memory. Alternating. Needs
Ray: `make test-engines` makes an environment that has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

JOB = Path(__file__).with_name("engines_job.py")
NODES, SECONDS, REPEATS = 2, 20.0, 3
CASES = ("compute", "talk")
SIDES = ("local", "joined", "ray")


def run(repeats: int, say: Callable[[str], None], seconds: float = SECONDS, cases: str = "") -> dict[str, Any]:
    """Batches/s of each side, and its share of the local launcher's in each round; medians."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, _cluster(Path(folder)) as environment:
        for case in cases.split(",") if cases else CASES:
            rounds: list[dict[str, float]] = []
            for i in range(min(repeats, REPEATS)):
                sides = SIDES if i % 2 else SIDES[::-1]
                found = {
                    side: _batches_per_s(side, case, seconds, Path(folder) / f"{i}{case}", environment)
                    for side in sides
                }
                rounds.append(found)
                say(f"{case}: " + ", ".join(f"{side} {found[side]:.1f}" for side in SIDES) + " batches/s")
            result[case] = {side: median(found[side] for found in rounds) for side in SIDES}
            result[case] |= {
                f"{side}_ratio": median(found[side] / found["local"] for found in rounds) for side in SIDES[1:]
            }
            say(f"{case}: Ray {result[case]['ray_ratio']:.3f} of local, by hand {result[case]['joined_ratio']:.3f}")
    return result


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[dict[str, str]]:
    """One Ray node with room for all nodes: what is measured is the launcher, not the network."""
    from ray.cluster_utils import Cluster

    places = {name: str(folder / name) for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME")}
    environment = {**places, "PYTHONPATH": str(JOB.parent.parent)}
    os.environ.update(environment)  # Ray's processes inherit it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": NODES, "include_dashboard": False})
    try:
        yield os.environ | environment | {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def _batches_per_s(side: str, case: str, seconds: float, out: Path, environment: dict[str, str]) -> float:
    out = out.with_name(f"{out.name}-{side}")
    wide = [sys.executable, "-m", "wide"]
    command = [*wide, "serve" if side == "joined" else "run", f"{JOB}:{case}", "--seconds", str(seconds)]
    command += ["--out", str(out), "--json", "--log", "silent"]
    command += {
        "local": ["--nodes", str(NODES)],
        "joined": ["--port", "0"],
        "ray": ["--on", "ray", "--nodes", str(NODES)],
    }[side]
    quiet = subprocess.DEVNULL
    pool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=quiet, env=environment)
    with pool, contextlib.ExitStack() as stack:
        if side == "joined":
            while not (out / "invite").exists() and pool.poll() is None:
                time.sleep(0.1)
            join = [*wide, "join", f"@{out / 'invite'}", "--allow-code", "any", "--log", "silent"]
            for _ in range(NODES):
                stack.enter_context(subprocess.Popen(join, stderr=quiet, env=environment))
        said, _ = pool.communicate()
    batches_per_s: float = json.loads(said)["batches_per_s"]
    return batches_per_s
