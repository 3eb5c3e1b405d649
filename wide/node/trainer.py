"""The user's model at work: from batches to a gradient sum. Never sees the network.

One lease is one block of the step's tree: each batch's weighted gradient is a leaf, summed in tree order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from wide.codec.layout import Flat, Layout, Slot, bind, bring_home, join
from wide.codec.spare import Spare
from wide.errors import TrainingFailed, WideError
from wide.job.definition import Job, Phase
from wide.job.descent import built, parameters_of
from wide.job.here import Here, enter, listen, weighted
from wide.job.loading import users_code
from wide.job.model import MIXED, batch_to, build_model, understood, without_gradients
from wide.job.reach import namespaces
from wide.job.seeding import OwnGenerators, mix, seed_everything
from wide.job.settings import be_exact
from wide.node.watch import Watch
from wide.strategy.tree import Block, TreeSum


class Enough(WideError):
    """Raised where the next batch is asked for: there will be no more; what has been summed is all."""


class Place(NamedTuple):
    """A batch's place in the run, and what its gradient weighs in the sum: n/N. In `local` a node's own steps may be at
    another `phase` of the job than the step is that the batch belongs to.
    """

    step: int
    batch: int
    samples: int
    weight: float
    epoch: int = 0
    phase: int | None = None


class _Home(NamedTuple):
    """Where the model keeps a buffer, and the memory that is its own, whatever the model assigns."""

    owner: dict[str, Any]
    key: str
    buffer: torch.Tensor
    memory: torch.Tensor
    pointer: int


class _Turn(NamedTuple):
    """A phase of the job: its loss, and the parameters that it does not train."""

    loss: Callable[[Any, Any], Any]
    others: list[torch.nn.Parameter]


class Trainer:
    """A model bound to a flat buffer, and the loop over a lease's batches."""

    def __init__(
        self, job: Job, seed: int, device: torch.device, spare: Spare | None = None, moved: Collection[str] = ()
    ) -> None:
        self.job = job
        self.seed = seed
        self.device = device
        be_exact(device)
        self.model = build_model(job, seed).to(device)
        self.layout = Layout(self.model, moved)
        self.weights = Flat(self.layout, only_live=False)  # where versions arrive, in host memory
        self.bound = self.weights if device.type == "cpu" else Flat(self.layout, only_live=False, device=device)
        bind(self.model, self.bound, self.layout)
        if self.bound is not self.weights:
            self.weights.raw.copy_(self.bound.raw)  # they may be the pool's, too
        by_name = dict(self.model.named_parameters())
        self._parameters = [by_name[slot.name] for slot in self.layout.trainable]
        self._all_touched = (1 << len(self._parameters)) - 1
        self._moved = [(i, self._parameters[i]) for i in self.layout.moved]
        self._watch = Watch(self.model, self.layout, self.bound)
        self._version = Flat(self.layout, only_live=True, device=device)  # its buffers: each batch starts from them
        constant = {id(buffer) for buffer in map(dict(self.model.named_buffers()).get, _names(self.layout.constant))}
        self._homes = [
            _Home(module._buffers, name, buffer, buffer.data, buffer.data_ptr())
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) not in constant
        ]
        self.steps: int | None = None  # of the run, if that is known
        self._turns = [_Turn(phase.loss, self._masked(job, phase)) for phase in job.turns]
        self.roots = {"model": self.model, "loss": [turn.loss for turn in self._turns]}
        self._own = OwnGenerators(**self.roots)
        self.namespaces = namespaces(self.model)
        self.spare = spare if spare is not None and device.type == "cpu" else Spare(self.layout, device)
        self._seeds: dict[tuple[float, torch.dtype, torch.Size], torch.Tensor] = {}  # a handful: two per epoch's end
        self.is_on_cpu = device.type == "cpu"
        self.expects_all = True  # with the next weights what never changes will come, too
        self._on_host = Flat(self.layout, only_live=True) if device.type != "cpu" else None
        self.buffers_changed()

    def expect_all(self) -> None:
        """With the next weights what never changes will come, too."""
        self.expects_all = True
        self._watch.forget()

    def keep_versions(self) -> None:
        """From now on versions arrive in memory of their own: differences are added to the last one, which neither the
        buffers' updates nor the user's code may touch.
        """
        if self.weights is self.bound:
            self.weights = Flat(self.layout, only_live=False)
            self.weights.raw.copy_(self.bound.raw)

    def weights_changed(self) -> None:
        """A new version has been written into `weights`."""
        if self.bound is not self.weights:
            live_nbytes = self.layout.live_nbytes
            self.bound.raw[:live_nbytes].copy_(self.weights.raw[:live_nbytes])
            self.take_what_never_changes()
        self.buffers_changed()

    def take_what_never_changes(self) -> None:
        """Frozen parameters and constant buffers come with a pool's first weights."""
        if self.expects_all and self.bound is not self.weights:
            self.bound.raw[self.layout.live_nbytes :].copy_(self.weights.raw[self.layout.live_nbytes :])
        self.expects_all = False

    def buffers_changed(self) -> None:
        """Each batch starts from the model's buffers as they are now."""
        if self._homes or self._moved:
            self._version.buffers_raw.copy_(self.bound.buffers_raw)
        for i, _ in self._moved:
            self._version.trainable[i].copy_(self.bound.trainable[i])

    def has_moved(self, update: Flat) -> bool:
        """Have this update's batches changed any buffer?"""
        is_kept = torch.equal(update.kept_raw, self._version.kept_raw)
        return not is_kept or any(bool(run.any()) for run in update.averaged_runs)

    def restore(self) -> None:
        """Undo what the last batch changed in buffers and parameters."""
        if self._moved:
            self._restore_parameters()
        for home in self._homes:
            home.owner[home.key] = home.buffer
        if self._homes or self._moved:
            self.bound.buffers_raw.copy_(self._version.buffers_raw)

    def take_as_it_is(self) -> None:
        """Somebody else's code has trained the model: what it put in the place of tensors is copied to where these
        live, and the next batch starts from the buffers as they are.
        """
        bring_home(self._parameters, self.bound.trainable)
        for home in self._homes:
            if home.owner.get(home.key) is not home.buffer or home.buffer.data_ptr() != home.pointer:
                _take_in(home)
                home.owner[home.key] = home.buffer
        self.buffers_changed()

    @property
    def all_touched(self) -> int:
        return self._all_touched

    def take_back(self, before: torch.Tensor) -> None:
        """As if nothing had been computed since the model looked like this."""
        self.bound.raw.copy_(before)
        self.buffers_changed()
        self.restore()

    @torch.no_grad()
    def _restore_parameters(self) -> None:
        assert self._version.requires_grad is not None
        for (i, parameter), is_trained in zip(self._moved, self._version.requires_grad.tolist(), strict=True):
            parameter.data = self.bound.trainable[i]  # if another tensor was assigned
            parameter.data.copy_(self._version.trainable[i])
            parameter.requires_grad_(is_trained)

    def seed_of(self, step: int, batch: int) -> int:
        return mix(self.seed, step, batch)

    def compute(self, places: Sequence[Place], batch_at: Callable[[int], Any]) -> tuple[Flat, list[float]]:
        """The gradient sum, in host memory (give it back with `release`), and the loss of each batch."""
        total, losses = self.sum(places, batch_at)
        return self.to_host(total), losses

    def sum(
        self, places: Sequence[Place], batch_at: Callable[[int], Any], into: Flat | None = None
    ) -> tuple[Flat, list[float]]:
        """The same where it was computed, in the order of the tree; in `into`, if that is given. `batch_at(i)` gives
        the i-th batch. Should it say that this is enough, the sum is over the tree's first whole block.
        """
        total: TreeSum[Flat] = TreeSum(Block(0, len(places)), self._join)
        self.spare.keep(len(places).bit_length() + 1)  # the tree's depth
        losses: list[float] = []
        self._watch.begin()
        with users_code("computing the loss and its gradient failed"):
            for i, place in enumerate(places):
                try:
                    batch = batch_at(i)
                except Enough:
                    if not losses:
                        raise
                    break
                room = into if i == 0 else None  # sums are made where their first batch lies
                leaf, loss = self.leaf(batch, place, room)
                total.add(Block(i, i + 1), leaf)
                losses.append(loss)
                if i == 0 and len(places) > 1:
                    self._watch.first_batch()
        self._watch.end()
        if len(losses) < len(places):
            block, part = total.first()
            losses = losses[: block.size]
        else:
            part = total.take()
        if len(part.weights) not in (0, len(losses)):
            raise TrainingFailed(MIXED)
        return part, losses

    def release(self, flat: Flat) -> None:
        if flat is not self._on_host:
            self.spare.give(flat)

    def _join(self, left: Flat, right: Flat) -> Flat:
        join(left, right)
        self.release(right)
        return left

    def to_host(self, flat: Flat) -> Flat:
        if self._on_host is None:
            return flat
        self._on_host.raw.copy_(flat.raw)
        self._on_host.touched, self._on_host.weights, self._on_host.logged = flat.touched, flat.weights, flat.logged
        self.release(flat)
        return self._on_host

    def leaf(self, batch: Any, place: Place, into: Flat | None = None) -> tuple[Flat, float]:
        if not self.is_on_cpu:
            batch = batch_to(batch, self.device)
        self.begin_batch(self.seed_of(place.step, place.batch))
        enter(self.here(place))
        logged = listen()
        turn = self._turns[self.phase_of(place)]
        said = understood(turn.loss(self.model, batch))
        without_gradients(self._parameters)
        self._backward(said.loss, place.weight if said.over is None else place.weight / place.samples)
        value = said.mean
        if not math.isfinite(value):
            raise TrainingFailed(f"the loss is {value}: lower the learning rate, set clip_norm, or check this batch")
        for parameter in turn.others:
            parameter.grad = None  # they have their turn in another phase
        leaf = into if into is not None else self.spare.take()
        leaf.weights = [] if said.over is None else [said.over * (place.weight / place.samples)]
        leaf.logged = weighted(logged, place.samples) if logged else {}
        self._gather_gradients(leaf)
        if self._moved:
            self._gather_parameters(leaf)
        if self._homes or self._moved:
            self._gather_buffers(leaf, place.weight)
        return leaf, value

    def begin_batch(self, seed: int) -> None:
        """Whatever was done before: buffers are the version's, there are no gradients, and random numbers follow from
        the seed.
        """
        self.restore()
        for parameter in self._parameters:
            parameter.grad = None
        seed_everything(seed, None if self.is_on_cpu else self.device)
        self._own.seed(seed)

    def here(self, place: Place) -> Here:
        return Here(place.step, place.epoch, place.batch, self.steps)

    def phase_of(self, place: Place) -> int:
        return (place.step if place.phase is None else place.phase) % len(self._turns)

    def _masked(self, job: Job, phase: Phase) -> list[torch.nn.Parameter]:
        """The parameters that are not this phase's, if there are others."""
        if len(job.turns) == 1:
            return []
        mine = {id(p) for p in parameters_of(built(phase.optimizer, self.model))}
        return [parameter for parameter in self._parameters if id(parameter) not in mine]

    def _backward(self, loss: torch.Tensor, weight: float) -> None:
        """(loss * weight).backward(), bit for bit: the gradient that enters the graph at `loss` is 1 * weight.

        torch.autograd.backward spends some 40 µs in Python before it calls the engine as we do here, and the product
        another 20: together a fifth of a small model's batch (docs/findings.md).
        """
        seed = self._seeds.get((weight, loss.dtype, loss.shape))
        if seed is None:
            seed = self._seeds[weight, loss.dtype, loss.shape] = torch.full_like(loss, weight, requires_grad=False)
        Variable._execution_engine.run_backward(
            (loss,), (seed,), False, False, (), allow_unreachable=True, accumulate_grad=True
        )

    def _gather_gradients(self, leaf: Flat) -> None:
        for parameter in self._parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        if len(gradients) == len(self._parameters):
            torch._foreach_copy_(leaf.trainable, gradients)
            leaf.touched = self._all_touched
            return
        leaf.touched = 0
        for i, (view, parameter) in enumerate(zip(leaf.trainable, self._parameters, strict=True)):
            if parameter.grad is None:  # unused in this batch
                view.zero_()
            else:
                view.copy_(parameter.grad)
                leaf.touched |= 1 << i

    @torch.no_grad()
    def _gather_parameters(self, leaf: Flat) -> None:
        """What the loss made of those that it moves; and their gradients' places, if they were frozen until now."""
        assert self.bound.requires_grad is not None
        for n, (i, parameter) in enumerate(self._moved):
            if parameter.shape != leaf.left[n].shape or parameter.dtype != leaf.left[n].dtype:
                name, was, now = self.layout.trainable[i].name, leaf.left[n], parameter
                raise TrainingFailed(
                    f"parameter {name} was {was.dtype} {tuple(was.shape)}, and the loss made it {now.dtype} "
                    f"{tuple(now.shape)}: a parameter keeps its shape and dtype"
                )
            self.bound.left[n].copy_(parameter)
            self.bound.requires_grad[n] = parameter.requires_grad

    def _gather_buffers(self, leaf: Flat, weight: float) -> None:
        """What this batch changed in the buffers. A buffer that did not change adds exactly nothing, -inf included."""
        with torch.no_grad():
            for home in self._homes:
                if home.owner.get(home.key) is not home.buffer or home.buffer.data_ptr() != home.pointer:
                    _take_in(home)
            runs = zip(self.bound.averaged_runs, self._version.averaged_runs, leaf.averaged_runs, strict=True)
            for after, before, change in runs:
                torch.sub(after, before, out=change)
                change.masked_fill_(after == before, 0).mul_(weight)
            leaf.kept_raw.copy_(self.bound.kept_raw)


def _take_in(home: _Home) -> None:
    """The model put another tensor in a buffer's place, or gave it other memory: it keeps the value, not the memory."""
    name, memory, now = home.key, home.memory, home.owner.get(home.key)
    if now is None:
        raise TrainingFailed(f"buffer {name} was taken away while a batch was computed: keep it")
    if (now.shape, now.dtype) != (memory.shape, memory.dtype):
        raise TrainingFailed(
            f"buffer {name} was {memory.dtype} {tuple(memory.shape)}, and a batch made it {now.dtype} "
            f"{tuple(now.shape)}: give it this dtype and size in model()"
        )
    memory.copy_(now)
    home.buffer.data = memory


def _names(slots: list[Slot]) -> list[str]:
    return [slot.name for slot in slots]
