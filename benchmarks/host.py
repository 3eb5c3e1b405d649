"""`host`: the pool against compute-only processes and PyTorch's DDP on one machine, with models that are not tiny; the
three sides alternate in one run.

The ceiling: processes that never talk, each with its own optimizer step as often as a pool of that size makes one.
"""

from __future__ import annotations

import contextlib
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
from typing import Any, NamedTuple

from benchmarks.together import Counts, free_port, together

JOB = Path(__file__).with_name("host_job.py")
PRELOAD = "benchmarks.host_model"
WARM_S = 1.5  # of each side, which do not count


class Case(NamedTuple):
    """A model, so many processes, an update per so many batches of all together; seconds for each side."""

    size: str
    nodes: int
    per_update: int
    seconds: float

    def __str__(self) -> str:
        return f"{self.size}, {self.nodes} nodes, an update per {self.per_update}"


CASES = (
    Case("small", 2, 2, 4.0),
    Case("small", 4, 4, 4.0),
    Case("small", 10, 10, 4.0),
    Case("small", 4, 16, 4.0),
    Case("middle", 2, 2, 6.0),
    Case("middle", 4, 4, 6.0),
    Case("large", 2, 2, 15.0),
    Case("large", 4, 4, 15.0),
)


def run(repeats: int, say: Callable[[str], None], cases: str = "") -> dict[str, Any]:
    """Medians of the ratios to the ceilings before and after; of the cases with these words in their name, such as
    `small_2_2`: size, nodes, batches for an update.
    """
    chosen = [case for case in CASES if cases in f"{case.size}_{case.nodes}_{case.per_update}"]
    say(f"about {sum(4 * (case.seconds + 7) for case in chosen) * repeats / 60:.0f} minutes")
    found = {case: _alternate(case, repeats, say) for case in chosen}
    return _summary(found)


def _alternate(case: Case, repeats: int, say: Callable[[str], None]) -> dict[str, float]:
    rounds = []
    top = ceiling(case)
    for i in range(repeats):
        pooled, longest_ms = pool(case)
        middle = ceiling(case)
        parallel = ddp(case)
        before, top = top, ceiling(case)
        row = {
            "ceiling": middle,
            "ratio": 2 * pooled / (before + middle),
            "ddp": 2 * parallel / (middle + top),
            "loop_max_ms": longest_ms,
        }
        rounds.append(row)
        say(f"{case}, round {i + 1}: ceiling {middle:.4g} batches/s, pool {row['ratio']:.2f}, DDP {row['ddp']:.2f}")
    return {name: median(row[name] for row in rounds) for name in rounds[0]}


def _summary(found: dict[Case, dict[str, float]]) -> dict[str, Any]:
    result: dict[str, Any] = {name: {} for name in ("ratio", "ddp", "ratio_10m", "ddp_10m", "ratio_50m", "ddp_50m")}
    for case, row in found.items():
        suffix = {"small": "", "middle": "_10m", "large": "_50m"}[case.size]
        if case.per_update != case.nodes:
            result |= {f"ratio_{case.per_update}": row["ratio"], f"ddp_{case.per_update}": row["ddp"]}
            continue
        result[f"ratio{suffix}"][str(case.nodes)] = row["ratio"]
        result[f"ddp{suffix}"][str(case.nodes)] = row["ddp"]
        if case.size == "large":
            result["loop_max_ms"] = max(result.get("loop_max_ms", 0.0), row["loop_max_ms"])
    return result


def pool(case: Case) -> tuple[float, float]:
    """One `wide run` as a user would start it: its batches/s once it is warm; the longest turn of its loop, in ms."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:{case.size}_{case.per_update}", "--log", "silent"]
        command += ["--nodes", str(case.nodes), "--seconds", str(case.seconds + WARM_S), "--json", "--out", str(out)]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        db = sqlite3.connect(out / "run.db")
        times = [at for (at,) in db.execute("SELECT merged_at FROM steps ORDER BY step")]
        query = "SELECT max(value) FROM samples WHERE metric = 'loop_max_ms' AND at > ?"
        (longest,) = db.execute(query, (times[0] + WARM_S,)).fetchone()
        db.close()
    warm = [at for at in times if at - times[0] >= WARM_S]
    return (len(warm) - 1) * case.per_update / (warm[-1] - warm[0]), longest or 0.0


def ceiling(case: Case) -> float:
    return together(case.nodes, PRELOAD, _compute, case)


def ddp(case: Case) -> float:
    with free_port() as port:
        return together(case.nodes, PRELOAD, _parallel, case, port)


def _compute(rank: int, barrier: Barrier, counts: Counts, case: Case) -> None:
    counts.put(_train(rank, case, barrier, _Plain()))


def _parallel(rank: int, barrier: Barrier, counts: Counts, case: Case, port: int) -> None:
    import torch.distributed as dist

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=case.nodes)
    counts.put(_train(rank, case, barrier, _Ddp()))
    barrier.wait()  # whoever leaves early would take its connections along
    dist.destroy_process_group()


class _Plain:
    """Nobody talks."""

    def wrap(self, model: Any) -> Any:
        return model

    def quiet(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def agree(self, steps: int) -> int:
        return steps


class _Ddp(_Plain):
    """Gradients are averaged; not before the last batch of an update."""

    def wrap(self, model: Any) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def quiet(self, model: Any) -> contextlib.AbstractContextManager[None]:
        context: contextlib.AbstractContextManager[None] = model.no_sync()
        return context

    def agree(self, steps: int) -> int:
        import torch
        import torch.distributed as dist

        dist.broadcast(count := torch.tensor([steps]), src=0)
        return int(count.item())


def _train(rank: int, case: Case, barrier: Barrier, way: _Plain) -> float:
    import torch
    from torch import nn

    from benchmarks import host_model

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss = way.wrap(host_model.model(host_model.WIDTHS[case.size])), nn.CrossEntropyLoss()
    optimizer = host_model.optimizer(list(model.parameters()))
    points, labels = host_model.points().tensors
    batches = torch.split(torch.randperm(len(points)), host_model.BATCH_SIZE)
    mine = case.per_update // case.nodes

    def step(number: int) -> None:
        optimizer.zero_grad()
        for i in range(mine):
            ids = batches[(rank + number * mine + i) % len(batches)]
            with contextlib.nullcontext() if i == mine - 1 else way.quiet(model):
                torch.autograd.backward(loss(model(points[ids]), labels[ids]) / mine)
        optimizer.step()

    def timed(steps: int) -> float:
        barrier.wait()
        start = time.perf_counter()
        for number in range(steps):
            step(number)
        return steps / (time.perf_counter() - start)

    timed(2)
    warm = timed(way.agree(max(2, round(WARM_S * timed(2)))))
    return mine * timed(way.agree(max(2, round(case.seconds * warm))))
