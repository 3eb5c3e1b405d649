"""Local training: steps of the job's own optimizer on this node, and what they changed. Never sees the network.

    Δ = anchor − θ      what is sent at a lease's end; then anchor ← θ, and the next lease goes on from there
    θ ← V + (θ − anchor), anchor ← V      when the pool's new weights V arrive, in the middle of a lease

So each step is part of exactly one Δ, however long the last one and the new weights have travelled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from wide.codec.layout import Flat, bring_home, by_counts, settle
from wide.job.definition import Job
from wide.job.descent import Descent
from wide.job.here import Logged, added
from wide.node.fused import Fused
from wide.node.trainer import Place, Trainer


class Drift:
    """How far a model has come from where it began, whoever moves it."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._anchor = Flat(trainer.layout, only_live=True, device=trainer.device)
        self._spare = Flat(trainer.layout, only_live=True, device=trainer.device)
        self._live = slice(0, trainer.layout.live_nbytes)
        self._touched = 0
        self._logged: Logged = {}

    def begin(self) -> None:
        """From the model as it is."""
        self._anchor.raw.copy_(self._trainer.bound.raw[self._live])

    @torch.no_grad()
    def rebase(self) -> None:
        """The pool's new weights are in `trainer.weights`: go on from them, with what was learned since the last Δ."""
        self._trainer.restore()
        bound, new, anchor = self._trainer.bound, self._spare, self._anchor
        new.raw.copy_(self._trainer.weights.raw[self._live])
        for mine, theirs, before in zip(bound.trainable, new.trainable, anchor.trainable, strict=True):
            mine.add_(theirs - before)
        for mine, theirs, before in zip(bound.averaged, new.averaged, anchor.averaged, strict=True):
            mine.add_((theirs - before).masked_fill_(theirs == before, 0))  # of what did not change nothing, -inf too
        bound.kept_raw.copy_(new.kept_raw)
        self._trainer.take_what_never_changes()
        self._anchor, self._spare = new, anchor
        self._trainer.buffers_changed()

    @torch.no_grad()
    def delta(self) -> Flat:
        """Δ, in host memory: what was changed since the last one."""
        bound, delta = self._trainer.bound, self._trainer.spare.take()
        for out, before, after in zip(delta.trainable, self._anchor.trainable, bound.trainable, strict=True):
            torch.sub(before, after, out=out)
        for out, before, after in zip(delta.averaged, self._anchor.averaged, bound.averaged, strict=True):
            torch.sub(after, before, out=out).masked_fill_(after == before, 0)
        delta.kept_raw.copy_(bound.kept_raw)
        delta.touched, self._touched = self._touched, 0
        delta.logged, self._logged, delta.weights = self._logged, {}, []
        self._anchor.raw.copy_(bound.raw[self._live])
        return self._trainer.to_host(delta)


class OwnSteps(Drift):
    """A trainer with an optimizer of its own, whose state stays on this node."""

    def __init__(self, job: Job, trainer: Trainer, fused: Fused, seed: int) -> None:
        super().__init__(trainer)
        self._fused = fused
        self._descent = Descent(job, trainer.model, [slot.name for slot in trainer.layout.trainable], seed)
        if trainer.is_on_cpu and not trainer.layout.moved:
            self._descent.use_runs(trainer.layout.places, trainer.bound.trainable_runs)

    def use_rates(self, rates: Sequence[float]) -> None:
        self._descent.use_rates(rates)

    def train(
        self,
        places: Sequence[Place],
        batch_at: Callable[[int], Any],
        group: int,
        goes_on: Callable[[int, int], bool],
    ) -> list[float]:
        """One step for each `group` of batches. Returns the loss of each batch. After each step `goes_on` is told how
        many of the batches are done, and may end it there.
        """
        losses: list[float] = []
        self._descent.advance(places[0].step, places[0].epoch)
        for first in range(0, len(places), group):
            mine = places[first : first + group]
            samples, number = sum(place.samples for place in mine), places[0].step + first // group
            weighted = [place._replace(weight=place.samples / samples, phase=number) for place in mine]
            total, new = self._fused.sum(weighted, partial(_shifted, batch_at, first))
            self._trainer.restore()
            settle(self._trainer.bound, total)
            self._logged = added(self._logged, total.logged)
            by_counts(total, len(new))
            self._descent.step(total.trainable, total.touched, number, total.trainable_runs)
            if not self._descent.is_torchs:
                bring_home(self._descent.parameters, self._trainer.bound.trainable)
            self._descent.advance(number + 1, mine[-1].epoch)
            self._move_buffers(total)
            self._touched |= total.touched | sum(1 << i for i in total.moved)
            self._trainer.release(total)
            losses += new
            if not goes_on(len(losses), len(places)) and len(losses) < len(places):
                break
        return losses

    @torch.no_grad()
    def _move_buffers(self, total: Flat) -> None:
        bound = self._trainer.bound
        for run, change in zip(bound.averaged_runs, total.averaged_runs, strict=True):
            run.add_(change)
        bound.kept_raw.copy_(total.kept_raw)
        self._trainer.buffers_changed()


def _shifted(batch_at: Callable[[int], Any], first: int, i: int) -> Any:
    return batch_at(first + i)
