"""A small trainable part beside a large frozen one, as in LoRA: 200 MB that never change, 110 KB that do."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide

WIDTH, RANK, FEATURES, CLASSES = 7040, 2, 64, 10


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.middle, self.top = (
            nn.Linear(FEATURES, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )
        for layer in (self.bottom, self.middle, self.top):
            layer.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(RANK, WIDTH) / WIDTH**0.5)
        self.up = nn.Parameter(torch.zeros(WIDTH, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.bottom(x))
        middle = self.middle(hidden) + nn.functional.linear(nn.functional.linear(hidden, self.down), self.up)
        top: torch.Tensor = self.top(torch.relu(middle))
        return top


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, FEATURES, generator=generator)
    return TensorDataset(x, torch.randint(0, CLASSES, (2048,), generator=generator))


job = wide.Job(
    model=Adapted,
    dataset=points,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
    evaluate=lambda model: {"one": 1.0},
    batch_size=4,
    batches_per_step=4,
    steps=10**9,
)
