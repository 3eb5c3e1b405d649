"""A program for torchrun: all kinds of jobs, one after the other, on the same two ranks. Rank 0 prints, by kind, how far
the loss of each step is from that of a plain loop, at most.
"""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide
from tests.jobs import EVERYTHING
from wide.config import Options
from wide.engine.follow import follow
from wide.engine.lead import Lead
from wide.engine.team import Team
from wide.launch.training import Origin, Training

STEPS = 6


def fading(model, batch):
    """A layer that is left out from the third step on, and a metric that is not finite."""
    wide.log(odd=math.nan)
    x = model[1](model[0](batch[0])) if wide.here().step < 2 else model[1](batch[0])
    return nn.functional.mse_loss(x, batch[0])


def attacked(model, batch):
    """Samples are moved to where they hurt, as in adversarial training: a backward of the loss's own, put away again."""
    x = batch[0].clone().requires_grad_()
    nn.functional.mse_loss(model(x), batch[0]).backward()
    moved = (x + 0.1 * x.grad.sign()).detach()
    model.zero_grad()
    return nn.functional.mse_loss(model(moved), batch[0])


KINDS = EVERYTHING | {
    "an attack on its own samples": wide.Job(
        model=lambda: nn.Linear(8, 8),
        dataset=lambda: TensorDataset(torch.randn(64, 8)),
        loss=attacked,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=4,
        batches_per_step=4,
    ),
    "a layer that is left out later": wide.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        dataset=lambda: TensorDataset(torch.randn(64, 8)),
        loss=fading,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        batch_size=4,
        batches_per_step=4,
    ),
}


def losses(job, folder, loop=None):
    training = Training(job, "job", Options(steps=STEPS, out=folder, log="silent"), Origin([]))
    training.loop = loop or training.loop
    training.train(None)
    with sqlite3.connect(folder / "run.db") as db:
        return [loss for (loss,) in db.execute("SELECT loss FROM steps ORDER BY step")]


def told(team, master):
    """Rank 0 hears what each rank has trained."""
    words = [hashlib.sha256(weight.flatten().view(torch.uint8).numpy()).hexdigest() for weight in master.trainable]
    return team.gathered("".join(words).encode())


class Watched(Lead):
    """At the end, all ranks have the same weights."""

    def train(self):
        super().train()
        assert len(set(told(self._team, self._course.master))) == 1, "ranks have other weights"


def compared(team, job):
    with tempfile.TemporaryDirectory() as folder:
        ours = losses(job, Path(folder) / "ddp", lambda job, course, samples, *_: Watched(team, job, course, samples))
        plain = losses(job, Path(folder) / "alone")
        assert len(ours) == len(plain) == STEPS
        return max(abs(a - b) / abs(b) for a, b in zip(ours, plain, strict=True))


if __name__ == "__main__":
    team = Team(torch.device("cpu"))
    found = {}
    for kind in sys.argv[1:] or [kind for kind, job in KINDS.items() if len(job.turns) == 1]:
        if team.is_first:
            found[kind] = compared(team, KINDS[kind])
        else:
            told(team, follow(team, KINDS[kind]))
    if team.is_first:
        print(json.dumps(found))
    team.close()
