"""The digits with a model of 1.13 M parameters: 4.5 MB each way for an update, where the seeds' model has 2 KB."""

import torch
from torch import nn

import wide
from examples.digits import accuracy, training_set

job = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    dataset=training_set,
    loss=wide.supervised(nn.CrossEntropyLoss()),
    optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    batch_size=32,
    batches_per_step=16,
    steps=10**9,
    evaluate=accuracy,
)
