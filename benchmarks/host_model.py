"""What the benchmarks on one host train: multilayer perceptrons of 1.13 M, 10 M and 50 M parameters on random points.
Knows torch only, so that other frameworks' environments can import it.
"""

import torch
from torch import nn
from torch.utils.data import TensorDataset

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
