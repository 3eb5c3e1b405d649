"""The ancestor's workload: 1,000 samples, ten classes, 430 parameters. Its loss stayed at ln 10; ours falls."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide

SAMPLES = 1000


def labelled_points() -> TensorDataset:
    """Random points, each labelled by a fixed random linear map: noise to look at, but learnable."""
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 10, generator=generator)
    teacher = torch.randn(10, 10, generator=generator)
    return TensorDataset(points, (points @ teacher).argmax(dim=1))


job = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 10)),
    dataset=labelled_points,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    batch_size=32,
    batches_per_step=10,
    epochs=100,
)

if __name__ == "__main__":
    result = wide.run(job, nodes=10)
    print(result.summary())
