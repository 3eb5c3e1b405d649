"""The jobs that `strategies` compares with: two examples with their held-out loss, and one whose speed is known."""

import os
import time

import msgspec
import torch
from torch import nn

import wide
from benchmarks.network_job import held_out
from examples.chargpt import job as chargpt
from examples.digits import job as digits_example
from examples.digits import training_set

__all__ = ["chargpt", "digits", "unequal"]

COMPUTING_S = 0.02  # a batch
BATCH_SIZE = 32
SLOWER = 4

digits = msgspec.structs.replace(digits_example, evaluate=held_out)


def timed_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """A sample takes as long as on some device that has no cores to share; four times as long on the first node that
    comes here.
    """
    global _sample_s
    if not _sample_s:
        try:
            os.close(os.open(os.environ["WIDE_BENCHMARK_MARK"], os.O_CREAT | os.O_EXCL))
            _sample_s = SLOWER * COMPUTING_S / BATCH_SIZE
        except FileExistsError:
            _sample_s = COMPUTING_S / BATCH_SIZE
    time.sleep(_sample_s * len(batch[0]))
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


_sample_s = 0.0

unequal = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    dataset=training_set,
    loss=timed_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    batch_size=BATCH_SIZE,
    batches_per_step=32,
    steps=10**9,
)
