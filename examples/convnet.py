"""Digits again, with everything that makes exactness hard: convolutions, BatchNorm's running statistics, dropout,
random shifts of the images, a dict for a batch, a learning-rate schedule and gradient clipping.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import Dataset

import wide

TRAINING_IMAGES = 1437


def images_and_labels() -> tuple[torch.Tensor, torch.Tensor]:
    digits = load_digits()
    order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(1))
    images = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1)
    return images[order], torch.tensor(digits.target)[order]


class ShiftedDigits(Dataset[dict[str, torch.Tensor]]):
    """Each image is moved by up to one pixel: other random numbers every time, the same ones on every machine."""

    def __init__(self) -> None:
        images, labels = images_and_labels()
        self.images, self.labels = images[:TRAINING_IMAGES], labels[:TRAINING_IMAGES]

    def __len__(self) -> int:
        return TRAINING_IMAGES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        down, right = torch.randint(-1, 2, (2,)).tolist()
        return {"image": self.images[index].roll((down, right), dims=(1, 2)), "label": self.labels[index]}


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 4 * 4, 10),
    )


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def accuracy(model: nn.Module) -> dict[str, float]:
    images, labels = images_and_labels()
    with torch.no_grad():
        right = model(images[TRAINING_IMAGES:]).argmax(dim=1) == labels[TRAINING_IMAGES:]
    return {"accuracy": right.float().mean().item()}


job = wide.Job(
    model=convnet,
    dataset=ShiftedDigits,
    loss=loss,
    optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=50, gamma=0.5),
    batch_size=32,
    batches_per_step=8,
    epochs=15,
    evaluate=accuracy,
    clip_norm=1.0,
)

if __name__ == "__main__":
    result = wide.run(job, nodes=4)
    print(result.summary())
