"""`--nodes 0`: the whole training in this one process, without a network: a small shell around the same pool, and the
reference for every other one.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from typing import Any

import torch

from wide.codec.layout import Flat
from wide.coordinator import events
from wide.coordinator.assembly import Course
from wide.coordinator.picture import Shell, picture, with_verdict
from wide.coordinator.queue import EventQueue
from wide.coordinator.record import Record
from wide.coordinator.run import Run
from wide.coordinator.steering import Steering
from wide.errors import ParametersMoved, TrainingFailed
from wide.exchange.inspection import NOT_FINITE
from wide.job.definition import Job
from wide.job.here import Here, leave
from wide.job.samples import Samples
from wide.node.carried import Carried
from wide.node.evaluator import copied, on_copy
from wide.node.selfcheck import SelfCheck
from wide.node.trainer import Enough, Place, Trainer
from wide.telemetry.journey import Journey
from wide.telemetry.lately import Lately
from wide.telemetry.process import rss_bytes
from wide.telemetry.snapshot import NodeView, Snapshot
from wide.telemetry.totals import NodeTotals, Traffic, totals_of

ME = 0  # the only node's number
LOOK_S, WAIT_S = 0.25, 0.05


class EvaluatesHere:
    """The user's evaluate() on a copy of the model, while training waits."""

    is_busy = is_full = False

    def __init__(self, job: Job, model: torch.nn.Module, record: Record, steps: int | None) -> None:
        self._job, self._model, self._record, self._steps = job, model, record, steps
        self.run: Run  # that is evaluated
        self._copy: torch.nn.Module | TrainingFailed
        self.is_wanted = job.evaluate is not None
        self.took_s = self.longest_s = 0.0

    def copy(self, weights: Flat, live_nbytes: int) -> memoryview:
        """They are evaluated at once: the model is copied, as it is now."""
        try:
            self._copy = copied(self._model)
        except TrainingFailed as error:
            self._copy = error
        return weights.bytes

    def ask(self, epoch: int, step: int, weights: memoryview) -> None:
        try:
            began = time.monotonic()
            where = Here(step, epoch, 0, self._steps)
            if isinstance(self._copy, TrainingFailed):
                raise self._copy
            metrics = on_copy(self._job, self._copy, self._record.schedule.seed, where)
        except TrainingFailed as error:
            self._record.evaluation_failed(str(error), error.details)
            self.run.not_evaluated()
        else:
            self.run.evaluated(epoch, step, metrics)
        self.took_s += (took_s := time.monotonic() - began)
        self.longest_s = max(self.longest_s, took_s)

    def hurry(self) -> None:
        """There is nothing that waits."""


class Alone:
    """A pool with one member, which is right here."""

    def __init__(self, job: Job, course: Course, samples: Samples, device: torch.device, checks: bool) -> None:
        self._course, self._samples, self._now = course, samples, course.clock.now
        self.pool, record = course.pool(is_open=False, is_alone=True), course.record()
        if course.start.position.front != course.schedule.position(course.start.position.steps):
            raise TrainingFailed(
                f"{course.start.position.strategy} training was stopped in the middle of a step: "
                "go on with at least one node"
            )
        self._traffic = {totals.node: totals.traffic for totals in course.start.nodes} | {ME: Traffic()}
        moved = course.master.moves
        self._trainer = Trainer(job, course.schedule.seed, device, course.master.spare, moved)
        self._trainer.steps = course.steps
        self._job = job
        self._carried: Carried | None = None
        if checks and self._trainer.is_on_cpu:
            self._try_job(job)
        record.node_joined(ME, "alone", socket.gethostname(), os.getpid())
        self._evaluation = EvaluatesHere(job, course.master.model, record, course.steps)
        self.run = self._evaluation.run = course.run(self.pool, record, self._evaluation, self.totals)
        self._lately, self._computed_s, self._fetched_s = Lately(), 0.0, 0.0
        self._queue = EventQueue(
            self.pool,
            {**self.run.performers, events.GrantLease: self._granted, events.DropNode: lambda drop: None},
            self._now,
        )
        self.run.tell_to(self._queue.post)
        course.catch_up(self.run)
        self._steering = None
        if course.asked is not None:
            self._steering = Steering(course.asked, self.pool, record.journal, self._queue.post, course.stop)
        self._grant: events.GrantLease | None = None
        self._version = -1  # of the weights that the trainer has
        self._looked_at = -LOOK_S

    def _try_job(self, job: Job) -> None:
        samples, size, seed = self._samples, self._samples.batch_size, self._course.schedule.seed
        count = -(-len(samples) // size)
        self._carried = self._carried or Carried(self._trainer.namespaces, **self._trainer.roots, **samples.roots)
        fetch = functools.partial(_first_batch, samples, size, seed)
        if problem := SelfCheck(self._trainer, fetch, count, self._carried).problem():
            raise TrainingFailed(problem)

    def train(self) -> None:
        try:
            self._decide(events.NodeJoined(ME))
            while self.run.ended is None:
                if self.run.stop_reason:
                    self._decide(events.StopRequested(self.run.stop_reason))
                elif self._grant is not None:
                    self._work(self._grant)
                else:
                    time.sleep(WAIT_S if self.pool.is_paused else 0.0)
                    self._decide(events.Ticked())
                self._look()
        except TrainingFailed as error:
            self._queue.finish()
            if self.run.is_between_versions:
                self._decide(events.RunFailed(str(error), error.details))  # what was trained until then is kept
            raise
        finally:
            leave()
            self.run.record.flush(force=True)
            self.run.record.journal.show(self._picture(self._now()))  # as it was when it ended
            seconds = self.run.record.seconds
            self._traffic[ME] = Traffic(compute_s=seconds, fetch_s=self._fetched_s, rss_bytes=rss_bytes())
            self.run.record.journal.node_left(ME, "the run is over")
            self.run.record.journal.series(self.totals(), self._now(), force=True)

    def totals(self) -> list[NodeTotals]:
        return [totals_of(node, part, self._traffic.get(node)) for node, part in self.run.record.parts.items()]

    def _decide(self, event: events.Event) -> None:
        self._queue.post(event)
        self._queue.work_off()

    def _granted(self, grant: events.GrantLease) -> None:
        if self.run.record.started_at is None:
            self.run.record.started(self._now())
        self._grant = grant

    def _work(self, grant: events.GrantLease) -> None:
        """Compute a lease, and hand it in."""
        self._grant = None
        schedule, trainer = self._course.schedule, self._trainer
        if grant.version != self._version:
            nbytes = trainer.layout.nbytes if self._version < 0 else trainer.layout.live_nbytes
            trainer.weights.raw[:nbytes].copy_(self._course.master.weights.raw[:nbytes])
            self._version = grant.version
            trainer.weights_changed()
        places, fetch = [], []
        for step, first, end in schedule.stretches(*grant.block):
            for batch, size in zip(range(first, end), schedule.sizes(step, first, end), strict=True):
                places.append(Place(step.number, batch, size, size / step.samples, step.epoch))
                fetch.append((step, batch))
        at = 0

        def batch_at(i: int) -> Any:
            nonlocal at
            at = i
            if self.run.stop_reason:
                raise Enough(self.run.stop_reason)
            step, batch = fetch[i]
            before = self._now()
            ids, seed = schedule.ids(step, batch, batch + 1), trainer.seed_of(step.number, batch)
            found = self._samples.batch(ids, seed, trainer.here(places[i]))
            self._fetched_s += self._now() - before
            return found

        began = self._now()
        try:
            flat, losses = trainer.compute(places, batch_at)
        except Enough:
            return
        except ParametersMoved:
            raise
        except TrainingFailed as error:
            self._decide(events.WorkFailed(ME, grant.lease, at, str(error), error.details))
            return
        if self._carried is not None and self._carried.has_news(self._now() - began):
            self._try_job(self._job)
        problem, now = "" if flat.is_finite() else NOT_FINITE, self._now()
        self._computed_s += now - began
        journey = Journey(now - began, 0.0, now, now)
        self.run.take(grant.lease, self._own(flat), [place.samples for place in places], losses, journey)
        self._decide(events.UpdateArrived(ME, grant.lease, problem, batches=len(losses)))

    def _own(self, flat: Flat) -> Flat:
        """In memory of the master's: on a CPU it is that already."""
        if self._trainer.is_on_cpu:
            return flat
        mine = self._course.master.spare.take()
        mine.raw.copy_(flat.raw)
        mine.touched = flat.touched
        self._trainer.release(flat)
        return mine

    def _look(self) -> None:
        """A picture of the run now and then; and is training still going anywhere?"""
        record, now = self.run.record, self._now()
        record.flush()
        if record.divergence.problem:
            self._decide(events.RunFailed(record.divergence.problem))
        if self._steering is not None:
            self._steering.look(now)
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        snapshot = self._course.window.latest = self._picture(now)
        if record.journal.series([view.totals for view in snapshot.nodes], now):
            record.journal.show(snapshot)

    def _picture(self, now: float) -> Snapshot:
        self._traffic[ME] = Traffic(compute_s=self._computed_s, fetch_s=self._fetched_s, rss_bytes=rss_bytes())
        evaluation, name, host = self._evaluation, self._course.name, socket.gethostname()
        shell = Shell(name, evaluating_s=evaluation.took_s, evaluation_s=evaluation.longest_s)
        mine = next(totals for totals in self.totals() if totals.node == ME)
        views = (NodeView(mine, None, is_silent=False, leases=1, host=host),)
        snapshot = picture(self.pool, self.run.record, views, now, shell, self._lately)
        return with_verdict(snapshot)


def _first_batch(samples: Samples, size: int, seed: int, i: int, other: int) -> Any:
    return samples.first_batch(i, size, seed, other)
