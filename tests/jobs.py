"""Jobs of every kind that PyTorch users write: small, and each with something that could go wrong."""

from __future__ import annotations

import random
from collections import UserDict, namedtuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import Dataset, Subset, TensorDataset, random_split

import wide

SAMPLES = 83  # with batches of 8: eleven batches, the last one short; with steps of 4: the last step is short too
Pair = namedtuple("Pair", ["x", "y"])


def points(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x @ torch.randn(6, 3, generator=generator)).argmax(1))


class Samples(Dataset):
    """Sample by sample, with random numbers of all three kinds, in the shape that `wrap` gives them."""

    def __init__(self, wrap):
        self.data, self.wrap = points(), wrap

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.wrap(x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * np.random.rand(), y)


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 3)).to(dtype)


class Odd(nn.Module):
    """Tied, frozen, unused, scalar and empty parameters; a constant buffer with -inf, a counter, a replaced buffer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.0)), nn.Parameter(torch.empty(0))
        self.sometimes = nn.Linear(6, 3)
        self.read_out = nn.Linear(6, 3)
        self.register_buffer("mask", torch.full((6,), float("-inf")))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("average", torch.zeros(6), persistent=False)

    def forward(self, x):
        self.seen += 1
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        hidden = torch.relu(self.second(torch.relu(self.first(x)))) + self.frozen(x)
        out = self.read_out(hidden - self.average) * self.scale
        return out + self.sometimes(hidden) if x[0, 0] > 0 else out


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


class Mixed(nn.Module):
    """One layer in fp64, one in bf16, one in fp32."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6).double(), nn.Linear(6, 6).bfloat16(), nn.Linear(6, 3)

    def forward(self, x):
        return self.c(self.b(self.a(x.double()).bfloat16()).float())


def of_dict(model, batch):
    return F.cross_entropy(model(batch["in"]["x"]), batch["y"][0])


def of_pair(model, batch):
    return F.cross_entropy(model(batch.x), batch.y)


class Noisy(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(torch.randn_like(p) * 1e-3)


class Sequences(Dataset):
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return (torch.arange(11) * (index + 3)) % 20


class Encoding(UserDict):
    """As tokenizers return it."""

    def __getattr__(self, name):
        return self.data[name]


def partly_frozen() -> nn.Module:
    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))
    model[0].eval()
    model[3].eval()
    return model


def random_points() -> TensorDataset:
    return TensorDataset(torch.randn(SAMPLES, 6), torch.randint(0, 3, (SAMPLES,)))


def make(**changes) -> wide.Job:
    settings = dict(
        model=mlp,
        dataset=points,
        loss=wide.supervised(nn.CrossEntropyLoss()),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
        batch_size=8,
        batches_per_step=4,
        seed=3,
    )
    return wide.Job(**(settings | changes))


def per_sample(model, batch):
    """A loss whose counts differ from batch to batch."""
    x, y = batch
    counts = y + 1
    return wide.total((F.cross_entropy(model(x), y, reduction="none") * counts).sum(), counts.sum())


class Rivals(nn.Module):
    """Two that take turns."""

    def __init__(self):
        super().__init__()
        self.maker, self.critic = nn.Linear(2, 6), nn.Linear(6, 1)

    def judged(self, x, wish):
        return F.binary_cross_entropy_with_logits(self.critic(x), torch.full((len(x), 1), wish))


RIVALS = (
    wide.Phase(
        lambda model, batch: (
            model.judged(batch[0], 1.0) + model.judged(model.maker(torch.randn(len(batch[0]), 2)).detach(), 0.0)
        ),
        lambda model: torch.optim.Adam(model.critic.parameters(), lr=0.01),
    ),
    wide.Phase(
        lambda model, batch: model.judged(model.maker(torch.randn(len(batch[0]), 2)), 1.0),
        lambda model: torch.optim.Adam(model.maker.parameters(), lr=0.01),
    ),
)


@torch.no_grad()
def shrink(model, where):
    for parameter in model.parameters():
        parameter.clamp_(-0.3, 0.3)


def by_name(model):
    """Groups by name, and two optimizers."""
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    others = [p for name, p in model.named_parameters() if not name.endswith("weight")]
    return [torch.optim.AdamW(weights, lr=0.01), torch.optim.SGD(others, lr=0.1)]


EVERYTHING = {
    "totals": make(loss=per_sample),
    "totals, in eight pieces": make(loss=per_sample, batch_size=20, batches_per_step=None),
    "phases": make(model=Rivals, phases=RIVALS, loss=None, optimizer=None),
    "two optimizers, given the model": make(
        optimizer=by_name, scheduler=lambda both: [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in both]
    ),
    "a scheduler that goes by epochs": make(
        scheduler=wide.per_epoch(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
    ),
    "weights that are clipped after each step": make(after_step=shrink),
    "an update in eight pieces": make(batch_size=21, batches_per_step=None),
    "an update smaller than eight": make(batch_size=3, batches_per_step=None),
    "batches of its own, another number every epoch": make(
        order=lambda epoch, generator: [
            ids.tolist() for ids in torch.randperm(SAMPLES, generator=generator).split(7 + 3 * epoch)
        ]
    ),
    "some samples, some of them twice": make(order=lambda epoch, generator: torch.arange(30) % (20 + epoch)),
    "mlp": make(),
    "one big step": make(batches_per_step=64),
    "one batch a step": make(batches_per_step=1),
    "a data set smaller than a batch": make(dataset=lambda: points(5)),
    "odd parameters and buffers": make(model=Odd),
    "batch norm, cumulative": make(model=lambda: nn.Sequential(nn.BatchNorm1d(6, momentum=None), mlp())),
    "batch norm, clipping, schedule": make(
        model=normed,
        clip_norm=0.5,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    ),
    "mixed dtypes": make(model=Mixed),
    "all bf16": make(
        model=lambda: mlp(torch.bfloat16),
        loss=lambda model, batch: F.cross_entropy(model(batch[0].bfloat16()), batch[1]),
    ),
    "channels last": make(
        model=lambda: nn.Sequential(nn.Conv2d(1, 4, 2), nn.Flatten(), nn.Linear(8, 3)).to(
            memory_format=torch.channels_last
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch[0].view(-1, 1, 2, 3)), batch[1]),
    ),
    "random samples": make(dataset=lambda: Samples(lambda x, y: (x, y))),
    "nested dicts": make(dataset=lambda: Samples(lambda x, y: {"in": {"x": x, "name": "n"}, "y": [y]}), loss=of_dict),
    "named tuples": make(dataset=lambda: Samples(Pair), loss=of_pair),
    "own collate": make(
        dataset=lambda: Samples(lambda x, y: (x, y)),
        collate=lambda samples: {
            "in": {"x": torch.stack([x for x, _ in samples])},
            "y": (torch.stack([y for _, y in samples]),),
        },
        loss=of_dict,
    ),
    "random data, split at random": make(dataset=lambda: random_split(random_points(), [70, 13])[0]),
    "an optimizer that adds noise": make(optimizer=lambda params: Noisy(params, lr=0.1)),
    "channels-last batches": make(
        model=lambda: nn.Sequential(
            nn.Conv2d(16, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.Flatten(), nn.Linear(32 * 16, 3)
        ),
        dataset=lambda: TensorDataset(torch.randn(40, 16, 8, 8), torch.arange(40) % 3),
        collate=lambda samples: [
            torch.stack([x for x, _ in samples]).to(memory_format=torch.channels_last),
            torch.stack([y for _, y in samples]),
        ],
    ),
    "views of one sequence": make(
        dataset=lambda: Sequences(),
        collate=lambda samples: (lambda seq: (seq[:, :-1], seq[:, 1:11], seq[:1].expand(4, -1)))(torch.stack(samples)),
        model=lambda: nn.Sequential(nn.Embedding(20, 7), nn.Linear(7, 20)),
        loss=lambda model, batch: (
            F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten()) + model(batch[2]).square().mean()
        ),
    ),
    "numpy in every order": make(
        dataset=lambda: Samples(lambda x, y: (x.numpy(), y)),
        collate=lambda samples: {
            "columns": np.asfortranarray(np.stack([x for x, _ in samples])),
            "backwards": np.stack([x for x, _ in samples])[:, ::-1],
            "y": torch.stack([y for _, y in samples]),
            "scale": np.float64(0.5),
            "name": np.str_("x"),
            "huge": 2**70,
            "phase": 1j,
        },
        loss=lambda model, batch: (
            F.cross_entropy(model(torch.from_numpy(batch["columns"])), batch["y"]) * float(batch["scale"])
            + model(torch.from_numpy(batch["backwards"].copy())).square().mean() * (batch["huge"] % 7)
        ),
    ),
    "a mapping with attributes": make(
        dataset=lambda: Samples(lambda x, y: (x, y)),
        collate=lambda samples: Encoding(
            {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}
        ),
        loss=lambda model, batch: F.cross_entropy(model(batch.x), batch["y"]),
    ),
    "parts in eval mode": make(model=partly_frozen),
    "pretrained, in eval mode": make(model=lambda: mlp().eval()),
    "a subset": make(dataset=lambda: Subset(points(), range(5, 70))),
    "one tensor": make(dataset=lambda: points().tensors[0], loss=lambda model, x: model(x).square().mean()),
    "sparse gradients": make(
        model=lambda: nn.Sequential(nn.EmbeddingBag(9, 6, sparse=True), nn.Linear(6, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        loss=lambda model, batch: F.cross_entropy(model((batch[0].abs() * 3).long().clamp(max=8)), batch[1]),
    ),
}
