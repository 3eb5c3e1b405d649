"""The loop around a pool that has no network: decisions and work take turns in one thread.

Who computes what is granted is for those who inherit it: this process alone (alone.py), or it and the other ranks of a
process group (engine/lead.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from wide.codec.layout import Flat
from wide.coordinator import events
from wide.coordinator.assembly import Course
from wide.coordinator.picture import Shell, picture, with_verdict
from wide.coordinator.queue import EventQueue, Perform
from wide.coordinator.record import Record
from wide.coordinator.run import Run
from wide.coordinator.steering import Steering
from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.here import Here, leave
from wide.node.evaluator import copied, on_copy
from wide.telemetry.lately import Lately
from wide.telemetry.snapshot import NodeView, Snapshot
from wide.telemetry.totals import NodeTotals, Traffic, totals_of

ME = 0  # the only member's number
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


class Loop:
    """A pool with one member, which is right here. Whoever inherits it says who computes (`_joined`), then `_begin`."""

    def __init__(self, job: Job, course: Course) -> None:
        self._job, self._course, self._now = job, course, course.clock.now
        self.pool, self._record = course.pool(is_open=False, is_alone=True), course.record()
        if course.start.position.front != course.schedule.position(course.start.position.steps):
            raise TrainingFailed(
                f"{course.start.position.strategy} training was stopped in the middle of a step: "
                "go on with at least one node"
            )
        self._traffic = {totals.node: totals.traffic for totals in course.start.nodes}
        self._lately = Lately()
        self._hosts: dict[int, str] = {}  # of those who compute
        self._grant: events.GrantLease | None = None
        self._looked_at = -LOOK_S
        self.run: Run

    def _joined(self, node: int, name: str, host: str, pid: int) -> None:
        self._record.node_joined(node, name, host, pid)
        self._hosts[node], self._traffic[node] = host, Traffic()

    def _begin(self, performers: Mapping[type[events.Action], Perform]) -> None:
        """`performers`: what is carried out in another way than a pool's coordinator does it."""
        course, record = self._course, self._record
        self._evaluation = EvaluatesHere(self._job, course.master.model, record, course.steps)
        self.run = self._evaluation.run = course.run(self.pool, record, self._evaluation, self.totals)
        own: dict[type[events.Action], Perform] = {**self.run.performers, events.GrantLease: self._granted}
        own[events.DropNode] = lambda drop: None
        self._queue = EventQueue(self.pool, own | dict(performers), self._now)
        self.run.tell_to(self._queue.post)
        course.catch_up(self.run)
        self._steering = None
        if course.asked is not None:
            self._steering = Steering(course.asked, self.pool, record.journal, self._queue.post, course.stop)

    def _work(self, grant: events.GrantLease) -> None:
        """Compute a lease, and hand it in."""
        raise NotImplementedError

    def _counted(self, is_over: bool) -> dict[int, Traffic]:
        """What those who compute have done until now, by number."""
        raise NotImplementedError

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
            self._traffic |= self._counted(is_over=True)
            for node in self._hosts:
                self.run.record.journal.node_left(node, "the run is over")
            self.run.record.journal.series(self.totals(), self._now(), force=True)

    def totals(self) -> list[NodeTotals]:
        return [totals_of(node, part, self._traffic.get(node)) for node, part in self._record.parts.items()]

    def _decide(self, event: events.Event) -> None:
        self._queue.post(event)
        self._queue.work_off()

    def _granted(self, grant: events.GrantLease) -> None:
        if self.run.record.started_at is None:
            self.run.record.started(self._now())
        self._grant = grant

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
        self._traffic |= self._counted(is_over=False)
        evaluation, hosts = self._evaluation, self._hosts
        shell = Shell(self._course.name, evaluating_s=evaluation.took_s, evaluation_s=evaluation.longest_s)
        here = [totals for totals in self.totals() if totals.node in hosts]
        views = [NodeView(totals, None, is_silent=False, leases=1, host=hosts[totals.node]) for totals in here]
        return with_verdict(picture(self.pool, self.run.record, views, now, shell, self._lately))
