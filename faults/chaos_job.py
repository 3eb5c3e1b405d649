"""What `chaos` trains: small, with dropout, momentum and a scheduler, so that a batch that is lost, doubled or computed
with other random numbers shows in the weights. Nodes sleep in each batch, which changes no bit, and so eight of them
are busy on two cores; the reference does not sleep.
"""

import os
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide

BATCH_SIZE, BATCHES_PER_STEP, STEPS_PER_EPOCH = 16, 16, 8
SAMPLES = BATCH_SIZE * BATCHES_PER_STEP * STEPS_PER_EPOCH
SLEEP_S = float(os.environ.get("CHAOS_SLEEP_MS", "0")) / 1000


def labelled_points() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(SAMPLES, 32, generator=generator)
    teacher = torch.randn(32, 10, generator=generator)
    return TensorDataset(points, (points @ teacher).argmax(dim=1))


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(SLEEP_S)
    points, labels = batch
    return nn.functional.cross_entropy(model(points), labels)


job = wide.Job(
    model=lambda: nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10)),
    dataset=labelled_points,
    loss=loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=500, eta_min=0.001),
    batch_size=BATCH_SIZE,
    batches_per_step=BATCHES_PER_STEP,
    steps=10**6,
)
