"""Jobs for one host: multilayer perceptrons of 1.13 M, 10 M and 50 M parameters on random points, an update after as
many batches as the name says: `small_2`, `small_16`, `middle_4`, `large_4`, …
"""

from functools import partial

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide

WIDTHS = {"small": 1024, "middle": 3072, "large": 7040}
SAMPLES, FEATURES, CLASSES, BATCH_SIZE = 4096, 64, 10, 32


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(dim=1))


def model(width: int) -> nn.Module:
    hidden = nn.Linear(FEATURES, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(width, CLASSES))


def optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01, momentum=0.9)


def make(size: str, batches_per_step: int) -> wide.Job:
    return wide.Job(
        model=partial(model, WIDTHS[size]),
        dataset=points,
        loss=wide.supervised(nn.CrossEntropyLoss()),
        optimizer=optimizer,
        batch_size=BATCH_SIZE,
        batches_per_step=batches_per_step,
        steps=10**9,
    )


globals().update({f"{size}_{count}": make(size, count) for size in WIDTHS for count in (2, 4, 10, 16)})
