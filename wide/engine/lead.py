"""Rank 0: the run's folder, ledger, checkpoints and evaluations, around a pool whose one member is the whole team.

What the pool grants, all ranks compute together (share.py); the ledger names the rank that computed each batch.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import replace

import msgspec
import psutil

from wide.coordinator import events
from wide.coordinator.aside import Pending
from wide.coordinator.assembly import Course
from wide.coordinator.queue import Perform
from wide.engine.replica import Replica
from wide.engine.share import Outcome, Share, moved, parts, refuse
from wide.engine.team import Lost, Order, Team
from wide.errors import ParametersMoved, TrainingFailed
from wide.exchange.inspection import NOT_FINITE
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.launch.loop import ME, Loop
from wide.strategy.tree import Block
from wide.telemetry.journey import Journey
from wide.telemetry.snapshot import Snapshot
from wide.telemetry.totals import Traffic

DDP = "ddp"  # what this way of training is called where others are called sync, async, local


class Lead(Loop):
    """The ranks are numbered as torch numbers them."""

    def __init__(self, team: Team, job: Job, course: Course, samples: Samples) -> None:
        super().__init__(job, course)
        refuse(job, samples)
        seed, descent = course.schedule.seed, course.master.descent
        told = {"seed": seed, "steps": course.steps, "samples": len(samples), "data": course.data}
        team.shared(told | {"descent": descent.state()})
        team.all_well(None)
        self._team, self._replica = team, Replica(job, course.master, seed, team.device, team.device.type != "cpu")
        self._share = Share(job, self._replica, samples, course.schedule, team, course.steps)
        self._rates = len(descent.group_rates) if descent.metric else 0
        self._outcome, self._began_at = Outcome([], [], []), 0.0
        self._seconds = [0.0] * team.size
        self._is_idle = True  # the others wait for an order
        self._pids: dict[int, int] = {}  # of ranks on this machine
        for rank, words in enumerate(team.gathered(introduction())):
            host, pid = msgspec.json.decode(words)
            self._joined(rank, f"rank-{rank}", host, pid)
            self._pids |= {rank: pid} if host == socket.gethostname() else {}
        performers: dict[type[events.Action], Perform] = {events.MergeUpdate: self._merge}
        performers |= {events.MakeVersion: self._make, events.CloseStep: self._shown}
        performers |= {events.SaveCheckpoint: self._shown, events.EndRun: self._shown}
        self._begin(performers)

    def train(self) -> None:
        try:
            super().train()
        finally:
            if self._is_idle:  # else they find out when this process ends
                self._team.stop(self._rates)

    def _work(self, grant: events.GrantLease) -> None:
        self._grant, self._is_idle, self._began_at = None, False, self._now()
        rates = self._course.master.descent.group_rates if self._rates else []
        order = Order(*grant.block, rates)
        self._team.say(order)
        try:
            self._outcome = self._share.compute(order)
        except ParametersMoved as error:
            raise moved(error) from None
        except Lost:
            raise
        except TrainingFailed as error:
            self._decide(events.WorkFailed(ME, grant.lease, self._share.at, str(error), error.details))
            return
        self._is_idle = True
        self._seconds = [a + b for a, b in zip(self._seconds, self._outcome.seconds, strict=True)]
        problem = "" if self._share.is_finite else NOT_FINITE
        self._decide(events.UpdateArrived(ME, grant.lease, problem, batches=grant.block.size))

    def _merge(self, merge: events.MergeUpdate) -> None:
        """One row for each rank that had a batch."""
        now, (first, end) = self._now(), merge.block
        ((step, low, high),) = self._course.schedule.stretches(first, end)
        sizes = self._course.schedule.sizes(step, low, high)
        journey = Journey(now - self._began_at, 0.0, now, now)
        for rank, (a, b) in enumerate(parts(high - low, self._team.size)):
            if a < b:
                its = msgspec.structs.replace(merge, node=rank, block=Block(first + a, first + b))
                losses, weights = self._outcome.losses[a:b], self._outcome.weights[a:b]
                self._record.merged(its, self.run.strategy, sizes[a:b], losses, journey, weights)

    def _make(self, make: events.MakeVersion) -> None:
        self.run.is_between_versions = False
        self._share.descend(make.steps)
        self.run.is_between_versions = True
        if logged := self._course.master.logged:
            self._record.logged(make.steps - 1, logged)

    def _shown(self, action: events.Action) -> Pending | None:
        """Somebody wants to see the weights, where they belong."""
        self._replica.come_home()
        return self.run.performers[type(action)](action)

    def _counted(self, is_over: bool) -> dict[int, Traffic]:
        found = {}
        for rank, seconds in enumerate(self._seconds):
            found[rank] = Traffic(compute_s=seconds, fetch_s=0.0 if rank else self._share.fetched_s)
            with contextlib.suppress(psutil.Error, KeyError):  # it is elsewhere, or has ended
                found[rank].rss_bytes = psutil.Process(self._pids[rank]).memory_info().rss
        return found

    def _picture(self, now: float) -> Snapshot:
        return replace(super()._picture(now), strategy=DDP, is_exact=False)


def introduction() -> bytes:
    return msgspec.json.encode((socket.gethostname(), os.getpid()))
