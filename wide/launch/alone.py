"""`--nodes 0`: the whole training in this one process, without a network: a small shell around the same pool, and the
reference for every other one.
"""

from __future__ import annotations

import functools
import os
import socket
from typing import Any

import torch

from wide.codec.layout import Flat
from wide.coordinator import events
from wide.coordinator.assembly import Course
from wide.coordinator.taken import Taken
from wide.errors import ParametersMoved, TrainingFailed
from wide.exchange.inspection import NOT_FINITE
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.launch.loop import ME, Loop
from wide.node.carried import Carried
from wide.node.selfcheck import SelfCheck
from wide.node.trainer import Enough, Place, Trainer
from wide.telemetry.journey import Journey
from wide.telemetry.process import rss_bytes
from wide.telemetry.totals import Traffic


class Alone(Loop):
    """The only member computes right here."""

    def __init__(self, job: Job, course: Course, samples: Samples, device: torch.device, checks: bool) -> None:
        super().__init__(job, course)
        self._samples = samples
        self._trainer = Trainer(job, course.schedule.seed, device, course.master.spare, course.master.moves)
        self._trainer.steps = course.steps
        self._carried: Carried | None = None
        if checks and self._trainer.is_on_cpu:
            self._try_job(job)
        self._joined(ME, "alone", socket.gethostname(), os.getpid())
        self._computed_s = self._fetched_s = 0.0
        self._version = -1  # of the weights that the trainer has
        self._begin({})

    def _try_job(self, job: Job) -> None:
        samples, size, seed = self._samples, self._samples.batch_size, self._course.schedule.seed
        count = -(-len(samples) // size)
        self._carried = self._carried or Carried(self._trainer.namespaces, **self._trainer.roots, **samples.roots)
        fetch = functools.partial(_first_batch, samples, size, seed)
        if problem := SelfCheck(self._trainer, fetch, count, self._carried).problem():
            raise TrainingFailed(problem)

    def _counted(self, is_over: bool) -> dict[int, Traffic]:
        computed_s = self._record.seconds if is_over else self._computed_s
        return {ME: Traffic(compute_s=computed_s, fetch_s=self._fetched_s, rss_bytes=rss_bytes())}

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
        digest, sizes = self._course.digest.of(flat, losses), [place.samples for place in places]
        self.run.take(grant.lease, Taken(self._own(flat), sizes, losses, journey, digest))
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


def _first_batch(samples: Samples, size: int, seed: int, i: int, other: int) -> Any:
    return samples.first_batch(i, size, seed, other)
