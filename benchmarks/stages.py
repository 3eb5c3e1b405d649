"""`stages`: the ancestor's six stages, as a small baseline, beside today's pool and PyTorch's DDP, on its workload with
ten nodes; all sides alternate in one run.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from statistics import median
from typing import Any

from benchmarks import seed
from benchmarks.together import Counts, free_port, together

NODES, SECONDS = 10, 3.0


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    from benchmarks.ancestor import STAGES

    names = [stage.name for stage in STAGES]
    say(f"about {repeats * (len(names) * (SECONDS + 4) + 40) / 60:.0f} minutes")
    found: dict[str, list[float]] = {name: [] for name in (*names, "ddp", "pool", "pool_40", "ceiling")}
    for i in range(repeats):
        for name in names:
            found[name].append(_stage(name))
        found["ddp"].append(_ddp())
        found["pool"].append(seed.pool("ten")["batches_per_s"])
        found["pool_40"].append(seed.pool("forty")["batches_per_s"])
        found["ceiling"].append(seed.ceiling())
        say(f"round {i + 1}: " + ", ".join(f"{name} {rates[-1]:.0f}" for name, rates in found.items()))
    rates = {name: median(values) for name, values in found.items()}
    last = median(pool / stage for pool, stage in zip(found["pool"], found[names[-1]], strict=True))
    ddp = median(pool / other for pool, other in zip(found["pool"], found["ddp"], strict=True))
    return {"batches_per_s": rates, "pool_vs_last_stage": last, "pool_vs_ddp": ddp}


def _stage(name: str) -> float:
    """In a process of its own, which has nothing else in it."""
    code = (
        "import torch; torch.set_num_threads(1); from benchmarks.ancestor import STAGES, batches_per_s; "
        f"print(batches_per_s(next(s for s in STAGES if s.name == {name!r}), {NODES}, {SECONDS}))"
    )
    return float(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True, text=True).stdout)


def _ddp() -> float:
    """Ten processes, an update per ten batches."""
    with free_port() as port:
        return together(NODES, seed.PRELOAD, _parallel, port)


def _parallel(rank: int, barrier: Barrier, counts: Counts, port: int) -> None:
    import os
    import time

    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks import seed_job

    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=NODES)
    model, loss = DistributedDataParallel(seed_job.model(), gradient_as_bucket_view=True), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    points, labels = seed_job.labelled_points().tensors
    batches = torch.split(torch.randperm(len(points)), 32)

    def train(steps: int) -> float:
        began = time.perf_counter()
        for i in range(steps):
            ids = batches[(rank + i * NODES) % len(batches)]
            optimizer.zero_grad()
            torch.autograd.backward(loss(model(points[ids]), labels[ids]))
            optimizer.step()
        return steps / (time.perf_counter() - began)

    steps = torch.tensor([max(5, int(SECONDS * train(10)))])
    dist.broadcast(steps, src=0)
    counts.put(train(int(steps.item())))
    barrier.wait()  # whoever leaves early would take its connections along
    dist.destroy_process_group()
