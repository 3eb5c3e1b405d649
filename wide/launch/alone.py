"""`--nodes 0`: the whole training in this one process with a plain loop; the reference for every pool."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

import torch

from wide.coordinator.events import MakeVersion, MergeUpdate, Position
from wide.coordinator.folds import SyncFold
from wide.coordinator.keeper import Keeper
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.job.schedule import Schedule, Step
from wide.node.evaluator import on_copy
from wide.node.trainer import Place, Trainer
from wide.strategy.tree import Block
from wide.telemetry.process import rss_bytes


class Alone:
    """A trainer and a master that hand each other gradients and weights, without a network between them."""

    def __init__(
        self, job: Job, master: Master, samples: Samples, schedule: Schedule, record: Record, keeper: Keeper
    ) -> None:
        self.job, self.master, self.samples, self.schedule, self.record = job, master, samples, schedule, record
        self.keeper = keeper
        self._is_between_versions = True
        self._ahead = 0  # versions before this process, less steps: other strategies make more or fewer
        self.fold = SyncFold(master, schedule)
        self.trainer: Trainer
        self.stop_reason = ""

    def train(
        self, start: Position, steps: int | None, seconds: float | None, save_every_s: float, device: torch.device
    ) -> str:
        """Go on from there. Returns why it ended; `stop_reason`, set from a signal handler, is one reason."""
        self._ahead = start.version - start.steps
        self.trainer = Trainer(self.job, self.schedule.seed, device)
        totals = self.record.node_joined(0, "alone", socket.gethostname(), os.getpid())
        self.record.started()
        number, saved_at = start.steps, time.monotonic()
        if number and self._is_evaluated_at(number, steps) and not self.record.is_evaluated(number):
            self._evaluate(number)  # it was not finished
        while not (why := self._why_end(number, steps, seconds)):
            step = self.schedule.step(number)
            try:
                is_whole = self._train_step(step)
            except TrainingFailed:
                if self._is_between_versions:
                    self._save(number)
                raise
            if not is_whole:
                why = self.stop_reason
                break
            number += 1
            if time.monotonic() - saved_at >= save_every_s:
                saved_at = time.monotonic()
                self._save(number)
            if self._is_evaluated_at(number, steps) or self._why_end(number, steps, seconds):
                self._evaluate(number)
            self.record.flush(time.monotonic())
            if self.record.divergence.problem:
                self._save(number)
                raise TrainingFailed(self.record.divergence.problem)
        self._save(number)
        totals.compute_s, totals.rss_bytes = self.record.seconds, rss_bytes()
        self.record.node_left(0, "the run is over")
        return why

    def _is_evaluated_at(self, done: int, steps: int | None) -> bool:
        return done == steps or self.schedule.step(done - 1).is_last_of_epoch

    def _evaluate(self, done: int) -> None:
        if not self.job.evaluate:
            return
        try:
            metrics = on_copy(self.job, self.master.model, self.schedule.seed)
        except TrainingFailed:
            self._save(done)
            raise
        self.record.evaluated(self.schedule.step(done - 1).epoch, done, metrics)

    def _save(self, steps: int) -> None:
        front = self.schedule.position(steps)
        position = Position("sync", steps + self._ahead, steps, steps, front, seconds=self.record.seconds)
        self.keeper.save(position, self.fold)

    def _why_end(self, done: int, steps: int | None, seconds: float | None) -> str:
        if steps is not None and done >= steps:
            return f"{done} steps done"
        if seconds is not None and self.record.seconds >= seconds:
            return f"{seconds:g} seconds are over"
        return self.stop_reason

    def _train_step(self, step: Step) -> bool:
        self.trainer.weights.raw.copy_(self.master.weights.raw)
        self.trainer.weights_changed()
        for batch in range(step.batches):
            if self.stop_reason:
                return False
            self._train_batch(step, batch)
        self._is_between_versions = False
        self.fold.make(MakeVersion(step.number, step.number + 1))
        self._is_between_versions = True
        self.record.step_closed(step)
        return True

    def _train_batch(self, step: Step, batch: int) -> None:
        sizes = self.schedule.sizes(step, batch, batch + 1)
        fetch: Callable[[int], object] = lambda _: self.samples.batch(  # noqa: E731
            self.schedule.ids(step, batch, batch + 1), self.trainer.seed_of(step.number, batch)
        )
        try:
            place = Place(step.number, batch, sizes[0], sizes[0] / step.samples)
            update, losses = self.trainer.compute([place], fetch)
            if not update.is_finite():
                raise TrainingFailed("the gradient is not finite: lower the learning rate or set clip_norm")
        except TrainingFailed as error:
            raise TrainingFailed(f"step {step.number}, batch {batch}: {error}", error.details) from None
        position = self.schedule.position(step.number) + batch
        merge = MergeUpdate(0, Block(position, position + 1), step.number + 1 + self._ahead)
        self.record.merged(merge, True, sizes, losses)
        mine = self.master.take_buffer()
        mine.raw.copy_(update.raw)
        mine.touched = update.touched
        self.trainer.release(update)
        self.fold.merge(merge, mine)
