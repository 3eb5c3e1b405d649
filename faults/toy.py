"""What simulated pools train: a model of a few numbers, whose "gradient" is a plain formula of the weights and of the
batch's place in the run. Cheap, and yet every wrong version, lost batch or torn payload shows in the result's bits.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide
from wide.codec.layout import Flat, join
from wide.codec.memory import Allocate
from wide.codec.spare import Spare
from wide.coordinator.events import MergeUpdate
from wide.coordinator.master import Master
from wide.job.model import build_model
from wide.job.schedule import Schedule
from wide.node.trainer import Place
from wide.strategy.policy import Made
from wide.strategy.synchronous import TreeFold
from wide.strategy.tree import Block, TreeSum

SEED = 5
LEAP = 1000.0  # where the job has a spike


class Toy(nn.Module):
    """Some weights, and a buffer that moves."""

    average: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("average", torch.zeros(4))


def toy_job(samples: int, is_plain: bool) -> wide.Job:
    return wide.Job(
        model=Toy,
        dataset=lambda: TensorDataset(torch.arange(samples, dtype=torch.float32)),
        loss=lambda model, batch: next(model.parameters()).sum(),  # nobody asks for it
        optimizer=lambda params: (
            torch.optim.SGD(params, lr=0.1, momentum=0.5) if is_plain else torch.optim.Adagrad(params, lr=0.1)
        ),
        batch_size=1,
        seed=SEED,
    )


def toy_master(job: wide.Job, allocate: Allocate | None = None) -> Master:
    return Master(job, build_model(job, SEED), SEED, allocate=allocate)


def loss_of(place: Place) -> float:
    return 1.0 + ((place.step * 7919 + place.batch * 104729) % 1000) / 1000


@torch.no_grad()
def toy_gradient(
    weights: Flat, places: list[Place], spare: Spare, is_finite: bool = True, spiked: Collection[int] = ()
) -> Flat:
    """The sum over these batches, in the order of the tree; of some of them (indices) it leaps."""

    def added(left: Flat, right: Flat) -> Flat:
        join(left, right)
        spare.give(right)
        return left

    total: TreeSum[Flat] = TreeSum(Block(0, len(places)), added)
    for i, place in enumerate(places):
        leaf = spare.take()
        for view, of in zip(leaf.trainable + leaf.averaged, weights.trainable + weights.averaged, strict=True):
            torch.mul(of, 0.1, out=view).add_(loss_of(place) - 1.5).mul_(place.weight * (LEAP if i in spiked else 1.0))
        leaf.touched = (1 << len(leaf.trainable)) - 1
        total.add(Block(i, i + 1), leaf)
    flat = total.take()
    if not is_finite:
        flat.sums[0][0] = float("nan")
    return flat


def trained_plainly(job: wide.Job, schedule: Schedule, steps: int, spike: range = range(0)) -> bytes:
    """What one machine would have made of it: the bytes of all that changes."""
    master = toy_master(job)
    fold: TreeFold[Flat] = TreeFold(master, schedule)
    for number in range(steps):
        step, start = schedule.step(number), schedule.position(number)
        for batch, size in enumerate(schedule.sizes(step, 0, step.batches)):
            places, spiked = [Place(number, batch, size, size / step.samples)], [0] if start + batch in spike else []
            flat = toy_gradient(master.weights, places, master.spare, spiked=spiked)
            fold.merge(MergeUpdate(0, 0, Block(start + batch, start + batch + 1), number + 1), flat)
        fold.make(Made(1.0), number + 1)
    return bytes(master.weights.bytes[: master.layout.live_nbytes])
