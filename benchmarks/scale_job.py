"""The ancestor's model and points, an update per as many batches as there are nodes: WIDE_SCALE."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(32000, 10, generator=generator), torch.randint(0, 10, (32000,), generator=generator)
    )


job = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)),
    dataset=points,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
    batch_size=1,
    batches_per_step=int(os.environ.get("WIDE_SCALE", "10")),
    steps=10**9,
)
