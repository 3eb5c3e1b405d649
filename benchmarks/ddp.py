"""`network_job` under PyTorch's DistributedDataParallel over Gloo: a rank on each host, a batch of every step per rank.

The batches and the first weights are those of a pool with the job's seed; but an epoch's last batch, which is short,
counts as much as any other. Rank 0 measures the held-out loss after every tenth update, with the clock stopped.
`train` starts the ranks; run as a program, this module is one of them. Knows nothing of pools.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.namespaces import Host
from benchmarks.network_job import held_out, job
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule

HOOKS = ("none", "fp16", "powersgd")
PORT = 29500
EVALUATE_EVERY = 10  # updates
EXACT_UPDATES = 2  # before PowerSGD begins: DDP rebuilds its buckets after the first, and PowerSGD refuses fewer
ONE_BUCKET_MB = 100  # with the usual two, PowerSGD over Gloo hangs, and no timeout of Gloo's ends it
STUCK_S = 60.0  # an all-reduce that takes longer has failed
SPARE_S = 120.0  # for starting, evaluating and ending
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "cable",  # as it is called inside each host
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # the hosts have no names, and torch warns of that at every connection
    "OMP_NUM_THREADS": "1",
}
ROOT = Path(__file__).parents[1]


def train(hosts: list[Host], hook: str, target: float, limit_s: float) -> dict[str, Any]:
    """A rank on each host, until the held-out loss is at the target or the time is over; what rank 0 printed."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | ENVIRONMENT
    command = [sys.executable, "-m", "benchmarks.ddp", "--world", str(len(hosts)), "--address", hosts[0].address]
    command += ["--hook", hook, "--target", str(target), "--seconds", str(limit_s)]
    ranks: list[subprocess.Popen[str]] = []
    try:
        for rank, host in enumerate(hosts):
            here = [*host.prefix, *command, "--rank", str(rank)]
            ranks.append(subprocess.Popen(here, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True))
        output, _ = ranks[0].communicate(timeout=limit_s + SPARE_S)
        codes = [process.wait(timeout=STUCK_S) for process in ranks]
    except subprocess.TimeoutExpired as late:
        raise SystemExit(f"DDP with hook {hook} did not end within {late.timeout:.0f} s; it was killed") from None
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    if any(codes):
        raise SystemExit(f"DDP with hook {hook} failed: its ranks ended with {codes}; what they said is above")
    result: dict[str, Any] = json.loads(output)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ddp")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world", type=int, required=True)
    parser.add_argument("--address", required=True, help="of rank 0's host")
    parser.add_argument("--hook", choices=HOOKS, default="none")
    parser.add_argument("--target", type=float, default=0.0, help="stop at this held-out loss")
    parser.add_argument("--seconds", type=float, default=60.0, help="stop after so many, evaluations not counted")
    options = parser.parse_args()
    torch.set_num_threads(1)
    where = f"tcp://{options.address}:{PORT}"
    patience = timedelta(seconds=STUCK_S)
    dist.init_process_group("gloo", where, rank=options.rank, world_size=options.world, timeout=patience)
    try:
        result = work(options.rank, options.world, options.hook, options.target, options.seconds)
        if options.rank == 0:
            print(json.dumps(result), flush=True)
        dist.barrier()  # whoever leaves early would take its connections along
    finally:
        dist.destroy_process_group()


def work(rank: int, world: int, hook: str, target: float, limit_s: float) -> dict[str, Any]:
    """One rank's training. Only rank 0 has a curve; its clock and its held-out loss say for all when to stop."""
    samples = Samples(job, job.seed)
    schedule = Schedule(len(samples), job.batch_size, world, job.seed)
    if schedule.batches_per_epoch % world:
        raise SystemExit(f"{world} ranks cannot share {schedule.batches_per_epoch} batches an epoch evenly")
    model = replica(hook)
    optimizer = job.optimizer(list(model.parameters()))
    curve: list[tuple[float, float]] = []
    dist.barrier()
    begin = time.perf_counter()
    updates = 0
    while True:
        batch = samples.batch(schedule.ids(schedule.step(updates), rank, rank + 1), 0)
        optimizer.zero_grad()
        torch.autograd.backward(job.loss(model, batch))
        optimizer.step()
        updates += 1
        if updates % EVALUATE_EVERY:
            continue
        stopped = time.perf_counter()
        if rank == 0:
            curve.append((stopped - begin, held_out(model.module)["held_out_loss"]))
        is_over = told(rank == 0 and (curve[-1][1] <= target or curve[-1][0] >= limit_s))
        begin += time.perf_counter() - stopped
        if is_over:
            return summary(hook, updates * world, target, curve) if rank == 0 else {}


def replica(hook: str) -> DistributedDataParallel:
    """The job's model, its gradients averaged over the ranks by way of the hook."""
    model = build_model(job, job.seed)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=EXACT_UPDATES)
        parallel = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
        parallel.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return parallel
    parallel = DistributedDataParallel(model)
    if hook == "fp16":
        parallel.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return parallel


def told(is_over: bool) -> bool:
    """What rank 0 says, on every rank."""
    flag = torch.tensor([is_over])
    dist.broadcast(flag, src=0)
    return bool(flag.item())


def summary(hook: str, batches: int, target: float, curve: list[tuple[float, float]]) -> dict[str, Any]:
    seconds, loss = curve[-1]
    return {
        "hook": hook,
        "batches": batches,
        "seconds": seconds,
        "batches_per_s": batches / seconds,
        "reached_s": seconds if loss <= target else None,
        "curve": curve,
    }


if __name__ == "__main__":
    main()
