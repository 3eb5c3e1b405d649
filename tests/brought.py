"""Programs as people bring them: aliases, caches, counters with a period, helpers in folders, optimizers that remember.
Sorted like those of stateful.py.
"""

from __future__ import annotations

import copy

import numpy as np
import torch
from torch import nn

from tests.jobs import make, mlp
from tests.stateful import Data, Net, data, net


def every(period, before=True):
    """Twice the output once in `period` calls; the call is counted before it is asked for, or after."""

    def after(self, out):
        self.calls += before
        out = out * 2 if self.calls % period == (0 if before else period - 1) else out
        self.calls += not before
        return out

    return net(after=after)


def once(at):
    def after(self, out):
        self.calls += 1
        if self.calls == at:
            self.average = 0.5
        return out * (1 - self.average)

    return net(after=after)


def noise_in_a_list(self, x, i):
    """A cache that was made with room for everything."""
    if not hasattr(self, "noise"):
        raise AssertionError
    if self.noise[i] is None:
        self.noise[i] = 0.1 * torch.randn(6)
    return x + self.noise[i]


class Roomy(Data):
    def __init__(self):
        super().__init__(noise_in_a_list)
        self.noise = [None] * len(self)


def hooked(period):
    """A hook of a parameter, which counts in its closure."""

    class Hooked(Net):
        def __init__(self):
            super().__init__()
            count = [0]

            def hook(gradient):
                count[0] += 1
                return gradient * 0.1 if count[0] % period == 0 else gradient

            self.inner[0].weight.register_hook(hook)

    return Hooked


class Transposed(nn.Module):
    """A parameter whose columns lie one behind the other."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 3)
        self.first.weight = nn.Parameter(torch.randn(6, 12).t())

    def forward(self, x):
        return self.last(torch.relu(self.first(x)))


class Parts(nn.Module):
    """Three parameters that are parts of one tensor, and do not overlap."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(part) for part in torch.randn(9, 6).chunk(3))

    def forward(self, x):
        return x @ self.q.t() + x @ self.k.t() * (x @ self.v.t())


class Kept(Net):
    """`keep` stores something of the parameters under another name."""

    def __init__(self, keep):
        super().__init__()
        self.kept = keep(self.inner[0].weight)


class AutoClip(torch.optim.SGD):
    """Clips by the history of its norms."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.history = []

    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        self.history.append(float(nn.utils.clip_grad_norm_(params, 1e9)))
        nn.utils.clip_grad_norm_(params, float(np.percentile(self.history, 30)))
        return super().step(closure)


class Lookahead(torch.optim.SGD):
    """Every third step goes half way back to the slow weights, which stand in a list."""

    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.slow, self.made = [p.detach().clone() for p in params], 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.made += 1
        for slow, fast in zip(self.slow, self.param_groups[0]["params"], strict=True):
            if self.made % 3 == 0:
                slow.lerp_(fast, 0.5)
                fast.copy_(slow)


def trained_before():
    """A backbone that was trained in model(), and has gradients left when it is frozen."""
    model = mlp()
    model(torch.ones(8, 6)).sum().backward()
    model[0].requires_grad_(False)
    return model


class Followed(nn.Module):
    """A student, a frozen copy, a large table: what an optimizer's hook or a scheduler may move along."""

    newest = None

    def __init__(self):
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.register_buffer("table", torch.zeros(8192))
        Followed.newest = self

    def forward(self, x):
        return self.student(x) + 0.1 * self.teacher(x) + self.table[:3]


def move_teacher_by_data(model):
    for old, new in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


@torch.no_grad()
def move_table(model):
    model.table[:3].add_(0.01 * model.student.bias)


def hooked_optimizer(move):
    def optimizer(params):
        made, model = torch.optim.SGD(params, lr=0.1), Followed.newest
        made.register_step_post_hook(lambda *_: move(model))
        return made

    return make(model=Followed, optimizer=optimizer)


class Moving(torch.optim.lr_scheduler.LRScheduler):
    """A scheduler that moves a teacher."""

    def __init__(self, optimizer):
        self.moved = Followed.newest
        super().__init__(optimizer)

    def get_lr(self):
        move_teacher_by_data(self.moved)
        return [group["lr"] for group in self.optimizer.param_groups]


def give_other_memory(self):
    if self.steps == 5:
        self.steps.data = self.steps.data + 10


class Between(nn.Module):
    """Two buffers that lie between each other, as real and imaginary parts do, and share nothing."""

    def __init__(self):
        super().__init__()
        self.inner, both = nn.Linear(6, 3), torch.randn(3, 2)
        self.register_buffer("real", both[:, 0])
        self.register_buffer("imaginary", both[:, 1])

    def forward(self, x):
        return self.inner(x) * self.real + self.imaginary


class Overlapping(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.zeros(8))
        self.register_buffer("head", self.bank[:3])


EXACT = {
    "gradients that model() left": make(model=trained_before),
    "a teacher that a hook moves by its data": hooked_optimizer(move_teacher_by_data),
    "a table that a hook moves": hooked_optimizer(move_table),
    "a teacher that a scheduler moves": make(model=Followed, scheduler=Moving),
    "a buffer that is given other memory": net(give_other_memory),
    "buffers between each other": make(model=Between),
    "a transposed weight": make(model=Transposed),
    "parts of one tensor": make(model=Parts),
    "the old spectral norm": make(
        model=lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 12)), nn.ReLU(), nn.Linear(12, 3))
    ),
    "channels last": make(
        model=lambda: nn.Sequential(
            nn.Unflatten(1, (1, 2, 3)),
            nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
    ),
    "an optimizer with a history": make(optimizer=AutoClip),
    "slow weights in a list": make(optimizer=Lookahead),
}
HONEST = {
    "a counter with a period, for the log": net(
        lambda self: (setattr(self, "calls", self.calls + 1), print("x") if self.calls % 32 == 0 else None)
    ),
    "a roomy cache of what is always the same": data(lambda self, x, i: self.cache.setdefault(i, x * 2)),
}
SHARES = "shares its memory with parameter inner.0.weight"
REFUSED = {
    **{f"once in {period} calls": (every(period), "model.calls") for period in (17, 32, 60)},
    "once in 200 calls, counted afterwards": (every(200, before=False), "model.calls"),
    "from the 140th call on": (once(140), "model.calls"),
    "noise in a list with room for all": (make(dataset=Roomy), "dataset.noise"),
    "a hook that counts": (make(model=hooked(50)), "count"),
    "parameters' data in a list": (make(model=lambda: Kept(lambda w: [w.data])), SHARES),
    "buffers that overlap": (make(model=Overlapping), "shares its memory with buffer"),
    "a buffer that is taken away": (
        net(lambda self: setattr(self, "steps", None) if self.steps == 5 else None),
        "buffer steps was taken away",
    ),
    "a parameter as an array": (make(model=lambda: Kept(lambda w: w.detach().numpy())), SHARES),
    "two parameters that overlap": (
        make(model=lambda: Kept(lambda w: nn.Parameter(w.data[:2]))),
        "shares its memory with parameter",
    ),
    "a scripted model": (make(model=lambda: torch.jit.script(mlp())), "torch.jit"),
    "a lazy model": (
        make(model=lambda: nn.Sequential(nn.LazyLinear(12), nn.ReLU(), nn.Linear(12, 3))),
        "is lazy: run one forward pass",
    ),
    "an optimizer that wants the model": (
        make(optimizer=lambda params: torch.optim.SGD(params.parameters(), lr=0.1)),
        "optimizer is given the list of the model's parameters",
    ),
    "a scheduler that wants a metric": (
        make(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau),
        "ReduceLROnPlateau needs a metric",
    ),
    "a collate that takes nothing": (
        make(dataset=lambda: Data(lambda self, x, i: x), collate=lambda: 0),
        "collate failed: TypeError",
    ),
    "sys.exit in the loss": (make(loss=lambda model, batch: exit_with("bye")), "SystemExit: bye"),
}


def exit_with(words):
    raise SystemExit(words)
