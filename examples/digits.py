"""Handwritten digits: 1,797 images of 8×8 pixels, a small network, accuracy on 360 images it never saw."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import wide


def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    return torch.tensor(digits.data / 16.0, dtype=torch.float32)[order], torch.tensor(digits.target)[order]


def training_set() -> TensorDataset:
    images, labels = images_and_labels()
    return TensorDataset(images[:1437], labels[:1437])


def accuracy(model: nn.Module) -> dict[str, float]:
    images, labels = images_and_labels()
    with torch.no_grad():
        right = model(images[1437:]).argmax(dim=1) == labels[1437:]
    return {"accuracy": right.float().mean().item()}


job = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)),
    dataset=training_set,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    batch_size=32,
    batches_per_step=16,
    epochs=60,
    evaluate=accuracy,
)

if __name__ == "__main__":
    result = wide.run(job, nodes=4)
    print(result.summary())
