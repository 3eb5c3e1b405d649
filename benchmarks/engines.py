"""`engines`: what Ray costs, against `wide run` with as many nodes on the same machine, and against nodes that somebody
has joined by hand: those talk as Ray's nodes do, by TLS over TCP, where `wide run` shares memory. Alternating. Beside
batches/s, CPU seconds for each batch, of all processes of that side, Ray's own included: they say what it costs where
other programs use the machine too. Needs Ray: `make test-engines` makes an environment that has it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

JOB = Path(__file__).with_name("engines_job.py")
NODES, SECONDS, REPEATS = 2, 20.0, 3
CASES = ("compute", "talk")
SIDES = ("local", "joined", "ray")
STATE = "XDG_STATE_HOME"
WIDE = [sys.executable, "-m", "wide"]


class Cost(NamedTuple):
    """Of one run."""

    batches_per_s: float
    cpu_s_per_batch: float


def run(repeats: int, say: Callable[[str], None], seconds: float = SECONDS, cases: str = "") -> dict[str, Any]:
    """Medians of each side; and its share of what the local launcher does, or takes, in the same round."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, _cluster(Path(folder)) as environment:
        for case in cases.split(",") if cases else CASES:
            rounds: list[dict[str, Cost]] = []
            for i in range(min(repeats, REPEATS)):
                outs = {side: Path(folder) / f"{case}-{i}-{side}" for side in (SIDES if i % 2 else SIDES[::-1])}
                rounds.append({side: _cost(side, case, seconds, out, environment) for side, out in outs.items()})
                for side in SIDES:
                    cost = rounds[-1][side]
                    cpu_ms = 1e3 * cost.cpu_s_per_batch
                    say(f"{case} {side}: {cost.batches_per_s:.1f} batches/s, {cpu_ms:.2f} CPU ms each")
            result[case] = {side: [median(found[side][k] for found in rounds) for k in (0, 1)] for side in SIDES}
            for side in SIDES[1:]:
                ratios = [[found[side][k] / found["local"][k] for found in rounds] for k in (0, 1)]
                result[case][f"{side}_ratio"], result[case][f"{side}_cpu_ratio"] = map(median, ratios)
                say(f"{case}: {side} ÷ local: batches/s {median(ratios[0]):.3f}, CPU a batch {median(ratios[1]):.3f}")
    return result


@contextlib.contextmanager
def _cluster(folder: Path) -> Iterator[dict[str, str]]:
    """One Ray node with room for all nodes: what is measured is the launcher, not the network."""
    from ray.cluster_utils import Cluster

    places = {name: str(folder / name) for name in (STATE, "XDG_CACHE_HOME")}
    os.environ.update({**places, "PYTHONPATH": str(JOB.parent.parent)})  # Ray's processes inherit it
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": NODES, "include_dashboard": False})
    try:
        yield os.environ | {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


def _cost(side: str, case: str, seconds: float, out: Path, environment: dict[str, str]) -> Cost:
    command = [*WIDE, "serve" if side == "joined" else "run", f"{JOB}:{case}", "--seconds", str(seconds)]
    command += ["--out", str(out), "--json", "--log", "silent"]
    command += ["--port", "0"] if side == "joined" else ["--nodes", str(NODES)]
    command += ["--on", "ray"] if side == "ray" else []
    pool = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    with pool, contextlib.ExitStack() as stack:
        if side == "joined":
            while not (out / "invite").exists() and pool.poll() is None:
                time.sleep(0.1)
            join = [*WIDE, "join", f"@{out / 'invite'}", "--allow-code", "any", "--log", "silent"]
            for _ in range(NODES):
                stack.enter_context(subprocess.Popen(join, stderr=subprocess.DEVNULL, env=environment))
        seen = _watched(pool, out, has_ray=side == "ray")
        said, _ = pool.communicate()
    result = json.loads(said)
    (first, before), (last, then) = seen[0], seen[-1]
    batches = (last - first) * result["batches"] / result["steps"]
    return Cost(result["batches_per_s"], sum(then[pid] - before[pid] for pid in before.keys() & then) / batches)


def _watched(pool: subprocess.Popen[bytes], out: Path, has_ray: bool) -> list[tuple[int, dict[int, float]]]:
    """Steps that are in run.db, and the CPU seconds until then of each process that took part."""
    seen: list[tuple[int, dict[int, float]]] = []
    mark = str(out.parent / STATE)
    while pool.poll() is None:
        time.sleep(0.5)
        with contextlib.suppress(psutil.Error, sqlite3.Error):
            with contextlib.closing(sqlite3.connect(f"file:{out}/run.db?mode=ro", uri=True)) as db:
                (steps,) = db.execute("select coalesce(max(step), 0) from steps").fetchone()
            processes = [one for one in _marked(mark) if has_ray or not _is_rays(one)]
            if steps:
                seen.append((steps, {one.pid: sum(one.cpu_times()[:2]) for one in processes}))
    return seen[1:-2]  # while all are there


def _marked(state: str) -> Iterator[psutil.Process]:
    """Processes that were started by this benchmark, by whomever: they keep their keys here."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(STATE) == state:
                yield process


def _is_rays(process: psutil.Process) -> bool:
    """Of a cluster that only waits, while somebody else is measured."""
    return any("site-packages/ray/" in word or word.startswith("ray::") for word in process.cmdline()[:3])
