"""Jobs whose code touches state. EXACT ones are trained as a plain loop would; REFUSED ones are refused, in words."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import random
import time
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.data import Dataset

from tests.jobs import make, mlp, points

SHARED = np.random.default_rng(5)
CALLS = 0


class Net(nn.Module):
    """`before` is what forward does first."""

    def __init__(self, before=lambda self: None, after=lambda self, out: out):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        self.other = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.generator, self.calls, self.average, self.seen = torch.Generator().manual_seed(1), 0, 0.0, []
        self.before, self.after, self.first = before, after, None

    @property
    def weight(self):
        return self.inner[0].weight

    def forward(self, x):
        self.steps += 1
        self.before(self)
        self.x = x
        return self.after(self, self.inner(x) + self.other(x))


def net(before=lambda self: None, after=lambda self, out: out):
    return make(model=lambda: Net(before, after))


def with_a_backward(model, batch):
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    return F.cross_entropy(model(batch[0]), batch[1])


def without_grad(change):
    def changed(self):
        with torch.no_grad():
            change(self)

    return changed


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.student = mlp()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)


def taught(update):
    def loss(model, batch):
        for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            update(old, new)
        with torch.no_grad():
            target = model.teacher(batch[0])
        return F.mse_loss(model.student(batch[0]), target) + F.cross_entropy(model.student(batch[0]), batch[1])

    return make(model=Taught, loss=loss)


def as_vector(self):
    vector_to_parameters(parameters_to_vector(self.inner.parameters()) * 0.999, self.inner.parameters())


def unfreeze(self):
    if self.steps > 3:
        self.other.requires_grad_(True)


def unfreeze_late(self, out):
    unfreeze(self)
    return out


def freeze(self):
    self.inner[2].requires_grad_(bool(self.steps < 4))


def change_mode(self):
    self.inner.train(not self.inner.training)


class Data(Dataset):
    """Points that `change` makes something else of."""

    def __init__(self, change):
        self.inner, self.change, self.calls = points(), change, 0
        self.rng, self.torch, self.python = np.random.default_rng(), torch.Generator().manual_seed(2), random.Random(4)
        self.old, self.cache = np.random.RandomState(4), {}

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        x, y = self.inner[i]
        return self.change(self, x, i), y


def data(change):
    return make(dataset=lambda: Data(change))


def collated(change):
    return make(dataset=lambda: Data(lambda self, x, i: x), collate=change)


def stacked(samples, more=0.0):
    return [torch.stack([x for x, _ in samples]) + more, torch.stack([y for _, y in samples])]


def noisy_collate():
    rng = np.random.default_rng(7)
    return lambda samples: stacked(samples, float(rng.normal()))


EXACT = {
    "a weight assigned": net(lambda self: setattr(self.weight, "data", F.normalize(self.weight.data))),
    "a weight assigned in the middle": net(
        after=lambda self, out: (setattr(self.weight, "data", F.normalize(self.weight.data)), self.inner(self.x))[1]
    ),
    "all weights from a vector": net(as_vector),
    "a weight scaled": net(without_grad(lambda self: self.weight.mul_(0.99))),
    "a weight scaled by way of .data": net(lambda self: self.weight.data.mul_(0.99)),
    "a weight clipped, as in WGAN": net(lambda self: self.weight.data.clamp_(-0.1, 0.1)),
    "one row kept at zero": net(without_grad(lambda self: self.weight[3].zero_())),
    "a bias put to its mean": net(lambda self: self.inner[2].bias.data.sub_(self.inner[2].bias.data.mean())),
    "a frozen weight that drifts": net(without_grad(lambda self: self.other.weight.add_(0.01))),
    "a frozen weight that follows": net(lambda self: self.other.weight.data.copy_(self.weight.data[:3])),
    "a teacher": taught(lambda old, new: old.data.mul_(0.9).add_(new.data, alpha=0.1)),
    "a teacher, assigned": taught(lambda old, new: setattr(old, "data", old.data * 0.9 + new.data * 0.1)),
    "a target network, copied": taught(lambda old, new: old.data.copy_(new.data)),
    "unfrozen on the way": net(unfreeze),
    "unfrozen at the end of a batch": net(after=unfreeze_late),
    "frozen on the way": net(freeze),
    "a counter for the log": net(lambda self: setattr(self, "calls", self.calls + 1)),
    "what was seen last": net(lambda self: setattr(self, "seen", [1, 2])),
    "a table made when it is needed": net(
        lambda self: setattr(self, "first", torch.ones(3)) if self.first is None else None,
        lambda self, out: out * self.first,
    ),
    "losses in a list": net(after=lambda self, out: (self.seen.append(float(out.mean())), out)[1]),
    "a cache of samples": data(lambda self, x, i: self.cache.setdefault(i, x * 2)),
    "the clock, for the log": net(lambda self: setattr(self, "average", time.time())),
}
OWN_GENERATORS = {
    "a model's own": (
        net(after=lambda self, out: out + 0.1 * torch.randn(out.shape, generator=self.generator)),
        lambda model, dataset: [model.generator],
    ),
    "a data set's own, never seeded": (
        data(lambda self, x, i: x + float(self.rng.random())),
        lambda model, dataset: [dataset.rng, dataset.torch, dataset.python, dataset.old],
    ),
    "four of a data set's own": (
        data(
            lambda self, x, i: (
                x
                + float(self.rng.random())
                + torch.rand(6, generator=self.torch)
                + self.python.random()
                + self.old.rand()
            )
        ),
        lambda model, dataset: [dataset.rng, dataset.torch, dataset.python, dataset.old],
    ),
    "one of the module's": (data(lambda self, x, i: x + float(SHARED.random())), None),
    "one in a closure": (collated(noisy_collate()), None),
    "one of the loss": (
        make(
            loss=lambda model, batch, rng=random.Random(3): F.cross_entropy(model(batch[0]), batch[1]) * rng.random()  # noqa: B008
        ),
        None,
    ),
}


class Teaching(torch.optim.SGD):
    """An optimizer that lets a frozen layer follow."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        parameters = self.param_groups[0]["params"]
        parameters[4].lerp_(parameters[0][:3], 0.3)


class Switching(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that freezes or unfreezes the last parameters at its fourth step."""

    def __init__(self, optimizer, is_trained):
        self.is_trained = is_trained
        super().__init__(optimizer)

    def get_lr(self):
        if self.last_epoch == 3:
            for parameter in self.optimizer.param_groups[0]["params"][-2 if self.is_trained else 0 :][:2]:
                parameter.requires_grad_(self.is_trained)
        return [group["lr"] for group in self.optimizer.param_groups]


class OwnNoise(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.generator, self.calls = torch.Generator(), 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.calls += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn(parameter.shape, generator=self.generator) * 1e-3 * self.calls)


EXACT |= {
    "a teacher that the optimizer moves": make(model=Net, optimizer=lambda params: Teaching(params, lr=0.1)),
    "unfrozen by the scheduler": make(model=Net, scheduler=lambda optimizer: Switching(optimizer, True)),
    "frozen by the scheduler": make(model=Net, scheduler=lambda optimizer: Switching(optimizer, False)),
    "rows that change places": net(lambda self: self.weight.data.copy_(self.weight.data.roll(1, 0))),
    "signs that change": net(lambda self: self.weight.data.neg_() if self.steps > 3 else None),
}
OWN_GENERATORS |= {
    "a hundred of a data set's": (
        make(dataset=lambda: Data(lambda self, x, i: x + HUNDRED[i % 100].random())),
        None,
    ),
}
HUNDRED = [random.Random(i) for i in range(100)]


class Odd:
    """Objects that do not like to be looked at."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        raise RuntimeError("do not compare me")

    def __getattr__(self, name):
        return {}[name]

    __hash__ = None


class OddKey:
    def __repr__(self):
        raise RuntimeError("no name")


def keeping(value):
    """A model that keeps what `value` makes of each batch."""
    return net(lambda self: setattr(self, "kept", value(self)))


class Transform:
    def __init__(self):
        self.calls, self.table = 0, torch.arange(6.0)

    def __call__(self, x):
        self.calls += 1
        return x + self.table * 0


def transformed():
    transforms = [Transform(), Transform()]
    return lambda self, x, i: transforms[1](transforms[0](x))


HONEST = {
    "inference tensors": keeping(lambda self: torch.inference_mode()(lambda: torch.zeros(2))()),
    "expanded tensors": keeping(lambda self: torch.zeros(1).expand(3, 3)),
    "read-only arrays": keeping(lambda self: np.broadcast_to(np.float64(self.steps), (3,))),
    "sparse tensors": keeping(lambda self: torch.eye(3).to_sparse()),
    "strings that grow": keeping(lambda self: np.array(["x" * int(self.steps)])),
    "arrays backwards": keeping(lambda self: np.arange(5.0)[::-1]),
    "arrays of the other end": keeping(lambda self: np.arange(5.0, dtype=">f4")),
    "conjugates": keeping(lambda self: torch.zeros(2, dtype=torch.complex64).conj()),
    "odd objects": keeping(lambda self: [Odd(int(self.steps)), {OddKey(): 1}]),
    "transforms with counters": make(dataset=lambda: Data(transformed())),
    "the system's generator, not used": make(loss=lambda m, b, r=random.SystemRandom(): F.cross_entropy(m(b[0]), b[1])),  # noqa: B008
    "a long list": net(lambda self: self.seen.extend(range(1000))),
    "prints now and then": net(lambda self: print("x") if self.steps % 50 == 0 else None),
    "a step of its own": net(lambda self: setattr(self, "mine", torch.optim.SGD(self.inner.parameters(), lr=0.1))),
}


class Cached(Net):
    """The first batch's statistics are kept for ever."""

    def forward(self, x):
        if self.first is None:
            self.first = x.mean(0)
        return super().forward(x - self.first)


def queued():
    queue = deque(maxlen=4)

    def loss(model, batch):
        queue.append(batch[0])
        return F.cross_entropy(model(batch[0]), batch[1]) + model(queue[0]).square().mean()

    return loss


def curriculum():
    calls = itertools.count()
    return lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]) * (1 + next(calls))


def counted(model, batch):
    global CALLS
    CALLS += 1
    return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1 if CALLS > 1_000 else 0.0)


def attributed(model, batch):
    attributed.calls = getattr(attributed, "calls", 0) + 1
    return F.cross_entropy(model(batch[0]), batch[1]) * (0.5 if attributed.calls % 100 == 0 else 1.0)


def remembered(model, batch, memory={}):  # noqa: B006
    memory["last"] = 0.9 * memory.get("last", 0.0) + 0.1 * float(batch[0].mean())
    return F.cross_entropy(model(batch[0] + memory["last"]), batch[1])


class Scaled:
    best = 1e9

    def __call__(self, model, batch):
        loss = F.cross_entropy(model(batch[0]), batch[1])
        Scaled.best = min(Scaled.best, float(loss))
        return loss * (1 + Scaled.best)


def evaluating(model, batch):
    loss = F.cross_entropy(model(batch[0]), batch[1])
    model.eval()
    return loss


def replaced(self):
    self.inner[0].weight = nn.Parameter(self.weight.detach() * 0.99)


def added(self):
    self.extra = nn.Parameter(torch.ones(3))


def average(self, out):
    self.average = 0.9 * self.average + 0.1 * float(out.mean())
    return out - self.average


def spoil(samples):
    x, y = samples[0]
    return [x[None], y[None]]


def in_place(model, batch):
    batch[0].mul_(0.5)
    return F.cross_entropy(model(batch[0]), batch[1])


class Late(Net):
    """Something that happens in the fifth step."""

    def __init__(self, change):
        super().__init__(after=lambda self, out: change(self, out))
        self.alpha, self.flag, self.counter = 1.0, False, itertools.count()
        self.dropout = nn.Dropout(0.5)
        self.register_buffer("mean", None)
        self.table = {}


def late(change):
    return make(model=lambda: Late(change))


def set_and(self, name, value, out):
    setattr(self, name, value)
    return out


def running_mean(self, out):
    mean = self.x.mean(0).detach()
    self.mean = mean if self.mean is None else 0.9 * self.mean + 0.1 * mean
    return out * (1 + self.mean.mean())


def lazily_registered(self, out):
    if not hasattr(self, "lazy"):
        self.register_buffer("lazy", torch.zeros(3))
    self.lazy = 0.9 * self.lazy + 0.1 * out.detach().mean(0)
    return out - self.lazy


def whole_numbers(self, out):
    self.steps = 0.9 * self.steps + 0.1 * out.detach().mean()
    return out - self.steps


def flagged(self, out):
    if (self.x[:, 0] > 1.8).any():
        self.flag = True
    return out * (2 if self.flag else 1)


def hidden_teacher():
    teachers = []

    def loss(model, batch):
        if not teachers:
            teachers.append(copy.deepcopy(model).requires_grad_(False))
        with torch.no_grad():
            for old, new in zip(teachers[0].parameters(), model.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return F.cross_entropy(model(batch[0]), batch[1]) + F.mse_loss(model(batch[0]), teachers[0](batch[0]))

    return loss


class Anchored(Net):
    anchor = None

    def forward(self, x):
        if self.anchor is None:
            self.anchor = [p.detach().clone() for p in self.parameters()]
        return super().forward(x) + sum(
            (p - a).square().sum() for p, a in zip(self.parameters(), self.anchor, strict=True)
        )


class Aliased(Net):
    def __init__(self, alias):
        super().__init__()
        alias(self)


@functools.cache
def remembered_noise(i):
    return random.gauss(0, 1)


REFUSED = {
    "a counter": (net(lambda s: setattr(s, "calls", s.calls + 1), lambda s, out: out * (1 + s.calls)), "calls"),
    "a warm-up that ends later": (
        net(lambda s: setattr(s, "calls", s.calls + 1), lambda s, out: out * (0.5 if s.calls < 900 else 1)),
        "model.calls",
    ),
    "an average in an attribute": (net(after=average), "model.average"),
    "the first batch's mean": (make(model=Cached), "model.first"),
    "a backward of its own": (make(loss=with_a_backward), "backward() was called before the pool's own"),
    "a queue of batches": (make(loss=queued()), "queue"),
    "an iterator": (make(loss=curriculum()), "keeps state from batch to batch"),
    "a global counter": (make(loss=counted), "CALLS"),
    "a counter of the function's": (make(loss=attributed), "attributed.calls"),
    "a default that remembers": (make(loss=remembered), "a default of loss"),
    "a class that remembers": (make(loss=Scaled()), "Scaled.best"),
    "history that counts when it is long": (
        net(after=lambda s, out: (s.seen.append(1), out * (2 if len(s.seen) > 50 else 1))[1]),
        "model.seen",
    ),
    "the clock": (net(after=lambda s, out: out * time.perf_counter()), "keeps state from batch to batch"),
    "an unseeded generator": (
        net(after=lambda s, out: out * float(np.random.default_rng().random())),
        "keeps state from batch to batch",
    ),
    "the system's random numbers": (data(lambda s, x, i: x + os.urandom(1)[0]), "the data of a batch is another one"),
    "eval mode left on": (make(loss=evaluating), "switches the model between train"),
    "a mode that changes": (net(change_mode), "switches the model between train"),
    "a parameter replaced by another": (net(replaced), "replaced by another object"),
    "a parameter added": (net(added), "was added while a batch was computed"),
    "samples that get more": (data(lambda s, x, i: x.add_(1)), "the data of a batch is another one"),
    "a data set that counts": (
        data(lambda s, x, i: (setattr(s, "calls", s.calls + 1), x * (1 + s.calls // 5_000))[1]),
        "dataset.calls",
    ),
    "batches that are the samples": (
        make(dataset=points, collate=spoil, batch_size=1, loss=in_place),
        "the data of a batch is another one",
    ),
    "a shape that changes": (
        net(after=lambda s, out: (setattr(s.other.bias, "data", s.other.bias.data[:2]), out)[1]),
        "a parameter keeps its shape",
    ),
}

OTHER_NAME = "shares its memory with parameter inner.0.weight"
REFUSED |= {
    "a number that changes later": (
        late(lambda s, out: (s.steps == 5 and set_and(s, "alpha", 0.5, 0), out * s.alpha)[1]),
        "alpha",
    ),
    "dropout that ends later": (
        late(lambda s, out: (s.steps == 5 and s.dropout.eval(), s.dropout(out))[1]),
        "switches the model between train",
    ),
    "a number that shrinks": (
        late(
            lambda s, out: (
                s.steps % 5 == 0 and set_and(s, "alpha", s.alpha * 0.9, 0),
                out * s.alpha,
            )[1]
        ),
        "keeps state from batch to batch",
    ),
    "a flag that the data sets": (late(flagged), "model.flag"),
    "an iterator that matters later": (late(lambda s, out: out * (2 if next(s.counter) > 20 else 1)), "model.counter"),
    "a counter with a window": (
        late(lambda s, out: set_and(s, "calls", s.calls + 1, out * (2 if 20 < s.calls < 60 else 1))),
        "model.calls",
    ),
    "a teacher that is no part of the model": (make(loss=hidden_teacher()), "teacher"),
    "a buffer that was None": (late(running_mean), "model.mean"),
    "a buffer that is registered later": (late(lazily_registered), "model.lazy"),
    "a buffer of another dtype": (late(whole_numbers), "give it this dtype and size in model()"),
    "noise that is remembered": (data(lambda s, x, i: s.cache.setdefault(i, x + torch.randn(6))), "dataset.cache"),
    "noise that a function remembers": (
        data(lambda s, x, i: x + remembered_noise(i)),
        "what remembered_noise remembers",
    ),
    "an anchor": (make(model=Anchored), "model.anchor"),
    "a buffer on a weight": (
        make(model=lambda: Aliased(lambda s: s.register_buffer("same", s.inner[0].weight.detach()))),
        OTHER_NAME,
    ),
    "an attribute on a weight": (
        make(model=lambda: Aliased(lambda s: setattr(s, "w", s.inner[0].weight.data))),
        OTHER_NAME,
    ),
    "a part of a weight": (
        make(model=lambda: Aliased(lambda s: setattr(s, "p", nn.Parameter(s.inner[0].weight.data[:2])))),
        "parameter inner.0.weight shares its memory with parameter p",
    ),
    "a weight on its side": (make(model=lambda: Aliased(lambda s: setattr(s, "t", s.inner[0].weight.t()))), OTHER_NAME),
}
