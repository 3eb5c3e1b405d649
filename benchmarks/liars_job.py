"""The jobs of `liars`: digits at a speed that leaves time to join, and to be found out.

`digits` as in the examples; `normed` with a BatchNorm, whose buffers can be lied about; `spiked`, whose learning rate
is forty times too large for a few steps in the middle; `small`, the seeds' workload with an update per four batches.
"""

import os
import time
from collections.abc import Callable

import msgspec
import torch
from torch import nn

from benchmarks.seed_job import make
from examples.digits import job as example

SAMPLE_S = 0.006 / 32  # a batch takes 6 ms, as on a device that has no cores to share
SPIKE = range(45, 51)  # steps
SPIKE_TIMES = 40.0


def timed_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """On a node that is WIDE_BENCHMARK_SLOWER times slower, it takes so much longer."""
    time.sleep(SAMPLE_S * len(batch[0]) * float(os.environ.get("WIDE_BENCHMARK_SLOWER", "1")))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def normed_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))


def with_a_spike(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    rate: Callable[[int], float] = lambda step: SPIKE_TIMES if step in SPIKE else 1.0  # noqa: E731
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


digits = msgspec.structs.replace(example, loss=timed_loss, epochs=30)
normed = msgspec.structs.replace(digits, model=normed_model)
spiked = msgspec.structs.replace(digits, scheduler=with_a_spike)
small = make(4)
