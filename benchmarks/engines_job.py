"""Jobs for clusters: `compute` is bound by computing (a convolutional net of 0.24 M parameters), `talk` by what is sent
(4.5 MB of weights and as much of gradients for every four short batches).
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide
from benchmarks import host_model


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(1024, 3, 32, 32, generator=generator), torch.randint(10, (1024,), generator=generator)
    )


def convnet() -> nn.Module:
    layers: list[nn.Module] = []
    for before, after in ((3, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128 * 4 * 4, 10))


compute = wide.Job(
    model=convnet,
    dataset=images,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    batch_size=32,
    batches_per_step=8,
    epochs=1000,
)

talk = wide.Job(
    model=lambda: host_model.model(host_model.WIDTHS["small"]),
    dataset=host_model.points,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=host_model.optimizer,
    batch_size=host_model.BATCH_SIZE,
    batches_per_step=4,
    epochs=1000,
)
