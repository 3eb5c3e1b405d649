"""The user's model at work: from batches to a gradient sum. Never sees the network.

One lease is one block of the step's tree: each batch's weighted gradient is a leaf, summed in tree order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import Variable

from wide.codec.layout import Flat, Layout, bind, join
from wide.codec.spare import Spare
from wide.errors import TrainingFailed, WideError
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.model import batch_to, build_model, check_loss
from wide.job.seeding import mix, seed_everything
from wide.strategy.tree import Block, TreeSum


class Enough(WideError):
    """Raised where the next batch is asked for: there will be no more; what has been summed is all."""


class Place(NamedTuple):
    """A batch's place in the run, and what its gradient weighs in the sum: n/N."""

    step: int
    batch: int
    samples: int
    weight: float


class Trainer:
    """A model bound to a flat buffer, and the loop over a lease's batches."""

    def __init__(self, job: Job, seed: int, device: torch.device, spare: Spare | None = None) -> None:
        self.job = job
        self.seed = seed
        self.device = device
        self.model = build_model(job, seed).to(device)
        self.layout = Layout(self.model)
        self.weights = Flat(self.layout, only_live=False)  # where versions arrive, in host memory
        self.bound = self.weights if device.type == "cpu" else Flat(self.layout, only_live=False, device=device)
        bind(self.model, self.bound, self.layout)
        if self.bound is not self.weights:
            self.weights.raw.copy_(self.bound.raw)  # they may be the pool's, too
        by_name = dict(self.model.named_parameters())
        self._parameters = [by_name[slot.name] for slot in self.layout.trainable]
        self._all_touched = (1 << len(self._parameters)) - 1
        self._version = Flat(self.layout, only_live=True, device=device)  # its buffers: each batch starts from them
        self._homes = [
            (module._buffers, name, buffer)
            for module in self.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self.spare = spare if spare is not None and device.type == "cpu" else Spare(self.layout, device)
        self._seeds: dict[tuple[float, torch.dtype, torch.Size], torch.Tensor] = {}  # a handful: two per epoch's end
        self.is_on_cpu = device.type == "cpu"
        self._on_host = Flat(self.layout, only_live=True) if device.type != "cpu" else None

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
            self.bound.raw.copy_(self.weights.raw)
        self.buffers_changed()

    def buffers_changed(self) -> None:
        """Each batch starts from the model's buffers as they are now."""
        if self._homes:
            self._version.buffers_raw.copy_(self.bound.buffers_raw)

    def has_moved(self, update: Flat) -> bool:
        """Have this update's batches changed any buffer?"""
        is_kept = torch.equal(update.kept_raw, self._version.kept_raw)
        return not is_kept or any(bool(run.any()) for run in update.averaged_runs)

    def restore_buffers(self) -> None:
        """Undo what the last batch changed in them."""
        for home, name, view in self._homes:
            home[name] = view
        if self._homes:
            self.bound.buffers_raw.copy_(self._version.buffers_raw)

    def seed_of(self, step: int, batch: int) -> int:
        return mix(self.seed, step, batch)

    def compute(self, places: Sequence[Place], batch_at: Callable[[int], Any]) -> tuple[Flat, list[float]]:
        """The gradient sum, in host memory (give it back with `release`), and the loss of each batch."""
        total, losses = self.sum(places, batch_at)
        return self.to_host(total), losses

    def sum(self, places: Sequence[Place], batch_at: Callable[[int], Any]) -> tuple[Flat, list[float]]:
        """The same where it was computed, in the order of the tree. `batch_at(i)` gives the i-th batch. Should it say
        that this is enough, the sum is over the tree's first whole block.
        """
        total: TreeSum[Flat] = TreeSum(Block(0, len(places)), self._join)
        self.spare.keep(len(places).bit_length() + 1)  # the tree's depth
        losses: list[float] = []
        with users_code("computing the loss and its gradient failed"):
            for i, place in enumerate(places):
                try:
                    batch = batch_at(i)
                except Enough:
                    if not losses:
                        raise
                    block, part = total.first()
                    return part, losses[: block.size]
                leaf, loss = self.leaf(batch, self.seed_of(place.step, place.batch), place.weight)
                total.add(Block(i, i + 1), leaf)
                losses.append(loss)
        return total.take(), losses

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
        self._on_host.touched = flat.touched
        self.release(flat)
        return self._on_host

    def leaf(self, batch: Any, seed: int, weight: float) -> tuple[Flat, float]:
        if not self.is_on_cpu:
            batch = batch_to(batch, self.device)
        self.restore_buffers()
        for parameter in self._parameters:
            parameter.grad = None
        seed_everything(seed, None if self.is_on_cpu else self.device)
        loss = check_loss(self.job.loss(self.model, batch))
        self._backward(loss, weight)
        value = loss.item()
        if not math.isfinite(value):
            raise TrainingFailed(f"the loss is {value}: lower the learning rate, set clip_norm, or check this batch")
        leaf = self.spare.take()
        self._gather_gradients(leaf)
        if self._homes:
            self._gather_buffers(leaf, weight)
        return leaf, value

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

    def _gather_buffers(self, leaf: Flat, weight: float) -> None:
        """What this batch changed in the buffers. A buffer that did not change adds exactly nothing, -inf included."""
        with torch.no_grad():
            for home, name, view in self._homes:
                now = home[name]
                if now is not view and now is not None:  # the model put another tensor in its place
                    view.copy_(now)
            runs = zip(self.bound.averaged_runs, self._version.averaged_runs, leaf.averaged_runs, strict=True)
            for after, before, change in runs:
                torch.sub(after, before, out=change)
                change.masked_fill_(after == before, 0).mul_(weight)
            leaf.kept_raw.copy_(self.bound.kept_raw)
