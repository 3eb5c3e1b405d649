"""One rank's share of a step under DistributedDataParallel: torch's own buckets, summed while the backward pass still
runs. Knows the job, its data and the team; what is computed next, and where it is written down, is decided elsewhere.

The samples, batches, seeds and weights (n/N) are those of `sync`; only the order in which gradients are added is
torch's, so the last bits differ. What DDP does in its own way: BatchNorm's running statistics are rank 0's.
"""

from __future__ import annotations

import contextlib
import math
import time
import warnings
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from wide.codec.layout import Flat, join
from wide.engine.replica import Replica
from wide.engine.team import Order, Team
from wide.errors import ParametersMoved, TrainingFailed, UsageError
from wide.job.definition import Job
from wide.job.here import Here, Logged, added, enter, listen, weighted
from wide.job.loading import users_code
from wide.job.model import MIXED, Said, batch_to, understood, without_gradients
from wide.job.samples import Samples
from wide.job.schedule import Schedule, Step
from wide.job.seeding import OwnGenerators, mix, seed_everything
from wide.job.settings import be_exact
from wide.node.trainer import Place
from wide.node.watch import Watch


class Outcome(NamedTuple):
    """Of one order: each batch's loss, and over how many it is a total, if it is; each rank's seconds."""

    losses: list[float]
    weights: list[float]
    seconds: list[float]


class Whole(nn.Module):
    """The job's loss as a module's forward: whatever it does with the model, DDP sees it."""

    said: Said

    def __init__(self, job: Job, model: nn.Module) -> None:
        super().__init__()
        self.model, self._loss = model, job.loss

    def forward(self, batch: Any) -> torch.Tensor:
        self.said = understood(self._loss(self.model, batch))
        return self.said.loss


def refuse(job: Job, samples: Samples) -> None:
    """What only a pool can do, in one line."""
    if len(job.turns) > 1:
        raise UsageError("Job(phases=…) is for wide run: torch.distributed trains one loss with one optimizer")
    if samples.stream is not None:
        raise UsageError(
            "a data set without a length is for wide run: every process of torch.distributed needs all of it"
        )


def parts(batches: int, ranks: int) -> list[tuple[int, int]]:
    """Each rank's batches, from first to end; with fewer batches than ranks, some have none."""
    return [(batches * rank // ranks, batches * (rank + 1) // ranks) for rank in range(ranks)]


class Share:
    """`at` is the batch of the order that is at work."""

    def __init__(
        self, job: Job, replica: Replica, samples: Samples, schedule: Schedule, team: Team, steps: int | None
    ) -> None:
        self._samples, self._schedule, self._team, self._replica = samples, schedule, team, replica
        self._steps, self.device = steps, team.device
        be_exact(team.device)
        self._whole = Whole(job, replica.model)
        self._own = OwnGenerators(model=replica.model, loss=job.loss)
        by_name = dict(replica.model.named_parameters())
        self._parameters = [by_name[slot.name] for slot in replica.layout.trainable]
        self._watch = Watch(replica.model, replica.layout, replica.weights)
        live = {slot.name for slot in (*replica.layout.averaged, *replica.layout.kept)}
        kept = {id(buffer) for name, buffer in replica.model.named_buffers() if name in live}
        self._homes = [
            (module._buffers, name, buffer)
            for module in replica.model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None and id(buffer) in kept
        ]
        self._total: Flat | None = None  # of the step, as far as it was computed
        self._missing = 0  # of its batches
        self._logged: Logged = {}
        self._took_s, self.fetched_s, self.at = 0.0, 0.0, 0
        self._ddp = self._wrapped()

    def _wrapped(self) -> DistributedDataParallel:
        """Constant buffers are the same everywhere already, and are not sent again with every step."""
        layout = self._replica.layout
        constant = [f"model.{slot.name}" for slot in layout.constant]
        ignore: Any = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(self._whole, constant)
        # A layer may be left out in any step: DDP, not told so, would keep another step's gradient without a word.
        options: dict[str, Any] = {"gradient_as_bucket_view": True, "find_unused_parameters": True}
        if not (layout.averaged or layout.kept):
            options["broadcast_buffers"] = False
        if self.device.type != "cpu":
            options["device_ids"] = [self.device]
        with self._team.together(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated", FutureWarning)  # since torch 2.13
            return DistributedDataParallel(self._whole, **options)

    def _place(self, step: Step, batch: int, weighs: bool = True) -> Place:
        size = self._schedule.sizes(step, batch, batch + 1)[0]
        return Place(step.number, batch, size, size / step.samples if weighs else 0.0, step.epoch)

    def compute(self, order: Order) -> Outcome:
        """These batches of the run, all of one step, by all ranks together; the sum is added to the step's total. A
        rank that has none takes part with one that weighs nothing.
        """
        if order.rates:
            self._replica.descent.use_rates(order.rates)
        ((step, low, high),) = self._schedule.stretches(order.first, order.end)
        mine = parts(high - low, self._team.size)[self._team.rank]
        places = [self._place(step, low + i) for i in range(*mine)] or [self._place(step, high - 1, weighs=False)]
        buffers = self._replica.weights.buffers_raw
        before, began = buffers.clone(), time.perf_counter()
        try:
            told = self._train(step, places, low, high)
        except BaseException:
            for owner, name, buffer in self._homes:
                owner[name] = buffer
            buffers.copy_(before)  # as the last whole version has them
            raise
        self._bring_buffers_home()
        self._took_s = time.perf_counter() - began
        count = high - low
        self._missing = (step.batches if self._total is None else self._missing) - count
        losses, weights, (has_total, has_logged) = told[:count], told[count : 2 * count], told[-2:]
        if has_total not in (0, count):
            raise TrainingFailed(MIXED)
        self._add(weights if has_total else [], bool(has_logged))
        return Outcome(losses, weights if has_total else [], told[2 * count : -2])

    @torch.no_grad()
    def _bring_buffers_home(self) -> None:
        """The model may have put other tensors in their place: the value stays, the memory is the run's."""
        for owner, name, buffer in self._homes:
            now = owner.get(name)
            if now is None or (now.shape, now.dtype) != (buffer.shape, buffer.dtype):
                raise TrainingFailed(f"buffer {name} got another shape or dtype, or was taken away: keep it")
            if now is not buffer:
                buffer.copy_(now)
                owner[name] = buffer

    def _train(self, step: Step, places: list[Place], low: int, high: int) -> list[float]:
        """What all ranks tell each other: losses, counts, seconds of the last order; how many are totals; who logs."""
        told = torch.zeros(2 * (high - low) + self._team.size + 2, dtype=torch.float64, device=self.device)
        told[2 * (high - low) + self._team.rank] = self._took_s
        self._logged = {}
        for parameter in self._parameters:
            parameter.grad = None
        self._watch.begin()
        for i, place in enumerate(places):
            self.at = place.batch - low
            batch, is_last = self._fetch(step, place), i == len(places) - 1
            quiet = contextlib.nullcontext() if is_last else self._ddp.no_sync()
            with users_code("computing the loss and its gradient failed"), self._team.together(), quiet:
                before = self._put_aside()
                loss = self._forward(batch, place, told, high - low)
                self._put_back(before)
                work = dist.all_reduce(told, async_op=True) if is_last else None  # while the backward pass runs
                torch.autograd.backward(loss, torch.full_like(loss, self._factor(place)))
                if work is not None:
                    work.wait()
        self._watch.end()
        return list(told.tolist())

    def _put_aside(self) -> list[torch.Tensor | None]:
        """Of the batches before: none of the loss's business."""
        before = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return before

    def _put_back(self, before: list[torch.Tensor | None]) -> None:
        without_gradients(self._parameters)
        for parameter, gradient in zip(self._parameters, before, strict=True):
            parameter.grad = gradient

    def _factor(self, place: Place) -> float:
        """DDP divides by the number of ranks."""
        over = self._whole.said.over
        return float(self._team.size * (place.weight if over is None else place.weight / place.samples))

    def _forward(self, batch: Any, place: Place, told: torch.Tensor, count: int) -> torch.Tensor:
        self._enter(place)
        metrics = listen()
        loss: torch.Tensor = self._ddp(batch)
        said = self._whole.said
        if not math.isfinite(value := said.mean):
            raise TrainingFailed(f"the loss is {value}: lower the learning rate, set clip_norm, or check this batch")
        if place.weight:
            told[self.at] = value
            if said.over is not None:
                told[count + self.at] = said.over * (place.weight / place.samples)
                told[-2] += 1
            self._logged = added(self._logged, weighted(metrics, place.samples))
            told[-1] = float(bool(self._logged))
        return loss

    def _enter(self, place: Place) -> None:
        seed = mix(self._schedule.seed, place.step, place.batch)
        seed_everything(seed, None if self.device.type == "cpu" else self.device)
        self._own.seed(seed)
        enter(self._here(place))

    def _here(self, place: Place) -> Here:
        return Here(place.step, place.epoch, place.batch, self._steps)

    def _fetch(self, step: Step, place: Place) -> Any:
        began = time.perf_counter()
        ids = self._schedule.ids(step, place.batch, place.batch + 1)
        batch = self._samples.batch(ids, mix(self._schedule.seed, place.step, place.batch), self._here(place))
        self.fetched_s += time.perf_counter() - began
        return batch if self.device.type == "cpu" else batch_to(batch, self.device)

    def _add(self, weights: list[float], has_logged: bool) -> None:
        """The gradients as a flat buffer has them; they are the same on every rank."""
        flat = self._replica.spare.take()
        flat.touched = 0
        for i, (view, parameter) in enumerate(zip(flat.trainable, self._parameters, strict=True)):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad)
                flat.touched |= 1 << i
        flat.buffers_raw.zero_()
        flat.kept_raw.copy_(self._replica.weights.kept_raw)  # the model has changed its buffers by itself
        flat.weights, flat.logged = weights, self._all_logged() if has_logged else {}
        if self._total is None:
            self._total = flat
        else:
            join(self._total, flat)
            self._replica.spare.give(flat)

    def _all_logged(self) -> Logged:
        total: Logged = {}
        for words in self._team.gathered(msgspec.msgpack.encode(self._logged)):
            total = added(total, msgspec.msgpack.decode(words, type=Logged))
        return total

    @property
    def is_whole(self) -> bool:
        """Are all batches of the step in?"""
        return self._missing == 0

    @property
    def is_finite(self) -> bool:
        return self._total is not None and self._total.is_finite()

    def descend(self, steps: int) -> None:
        """All batches of the step are in the total: make the step, the `steps`-th."""
        assert self._total is not None
        total, self._total = self._total, None
        step = self._schedule.step(steps - 1)
        try:
            self._replica.descend(total, step.batches, steps, self._schedule.step(steps).epoch)
        except ParametersMoved as error:
            names = ", ".join(error.names[:5])
            raise TrainingFailed(f"after_step, or the optimizer, moves {names}: only wide run follows that") from None


def moved(error: ParametersMoved) -> TrainingFailed:
    return TrainingFailed(
        f"{error}: only wide run follows that; with torch.distributed every rank would have another model"
    )
