"""Digits, trained by a loss (`plain`) and by a loop of the script (`job`): the same bits, so only time differs."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

import wide


def data() -> torch.utils.data.TensorDataset:
    x = torch.randn(8192, 256, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x[:, :10].argmax(1))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def made(by: object) -> wide.Job:
    return wide.Job(
        model=build,
        dataset=data,
        loss=by,  # type: ignore[arg-type]
        optimizer=lambda params: torch.optim.SGD(params, lr=0.05),
        batch_size=32,
        batches_per_step=16,
        steps=400,
    )


plain, job = made(loss), made(wide.member)

if __name__ == "__main__":
    model = build()
    with wide.member(model, job) as pool:
        for batch in pool:
            pool.backward(loss(model, batch))
