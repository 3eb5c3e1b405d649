"""What `workers` trains: a model, and samples that cost what SAMPLE_CPU_S or SAMPLE_WAIT_S says; DATA_MB of data."""

from __future__ import annotations

import os
import time

import msgspec
import torch
from torch import nn

import wide

CPU_S, WAIT_S = float(os.environ.get("SAMPLE_CPU_S", 0)), float(os.environ.get("SAMPLE_WAIT_S", 0))
DATA_MB = float(os.environ.get("DATA_MB", 1))
BATCH, WIDTH = 32, 512


class Costly(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """As an image that is decoded, or read from far away."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        x, until = torch.randn(WIDTH), time.process_time() + CPU_S
        while time.process_time() < until:
            pass
        time.sleep(WAIT_S)
        return x, int(x.sum() > 0)


def large() -> torch.Tensor:
    return torch.full((int(DATA_MB * 1e6) // (4 * WIDTH), WIDTH), 0.01)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 2))


def sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


costly = wide.Job(
    model=model,
    dataset=Costly,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=sgd,
    batch_size=BATCH,
    batches_per_step=8,
)


def captured() -> wide.Job:
    """As a script or a notebook has it: the data are there, and a closure uses them."""
    data = large()
    return msgspec.structs.replace(heavy, dataset=lambda: data)


heavy = wide.Job(
    model=lambda: nn.Linear(WIDTH, 1),
    dataset=large,
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=sgd,
    batch_size=BATCH,
)
