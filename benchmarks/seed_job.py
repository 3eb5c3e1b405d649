"""The seeds' workload as jobs: an update per 10 batches, and per 40. The 1,000 samples come 32 times an epoch,
so that an epoch has 1,000 batches and no step is cut short by its end.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide

REPEATS = 32
SAMPLES = 1000


def labelled_points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 10, generator=generator)
    teacher = torch.randn(10, 10, generator=generator)
    labels = (points @ teacher).argmax(dim=1)
    return TensorDataset(points.repeat(REPEATS, 1), labels.repeat(REPEATS))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10))


def make(batches_per_step: int) -> wide.Job:
    return wide.Job(
        model=model,
        dataset=labelled_points,
        loss=wide.supervised(nn.CrossEntropyLoss()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=32,
        batches_per_step=batches_per_step,
        steps=10**9,
    )


ten, forty = make(10), make(40)
