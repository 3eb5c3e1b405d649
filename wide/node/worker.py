"""A node at work: build what is to be trained, then compute leases until told to stop. Knows no processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from wide.codec.batch import unpack
from wide.codec.layout import Flat
from wide.errors import ProtocolError, TrainingFailed, WideError
from wide.failpoint import reach
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT
from wide.node.inbox import Inbox, Package, Stopped
from wide.node.local import LocalTraining
from wide.node.parcels import Parcels
from wide.node.passes import Passes
from wide.node.trainer import Enough, Place, Trainer
from wide.telemetry.process import rss_bytes
from wide.transport.connection import Connection
from wide.wire import messages as say

RSS_EVERY_S = 1.0
LOOK_UP_S = 0.1
LOOK_OFTEN_S = 0.005  # where messages travel while batches are computed
FINISH_S = 2.0  # a lease that will be done within this is finished before its node leaves
GOODBYE_S = 2.0


class Unwanted(WideError):
    """The lease at hand is no longer of interest: most likely the run is over."""


class Left(WideError):
    """This machine wants to leave the pool."""


class Worker:
    """Computes leases, one after the other."""

    def __init__(self, connection: Connection, job: Job, welcome: say.Welcome, device: torch.device) -> None:
        self._job, self._welcome = job, welcome
        self._samples: Samples | None = None
        self._leaving_why = ""
        self._looked_at = self._began_at = 0.0
        self._batch = -1  # which batch of the lease is being computed: for messages about failures
        self._rss = (0.0, 0)
        self._problem = ""
        if welcome.data != "stream":
            try:
                self._samples = Samples(job, welcome.seed)
            except TrainingFailed as error:
                self._problem = str(error)
        self._trainer = Trainer(job, welcome.seed, device)
        self._passes = Passes(self._trainer)
        self._local: LocalTraining | None = None
        self._parcels = Parcels(connection, self._trainer)
        self.attach(connection)

    def may_serve(self, welcome: say.Welcome) -> bool:
        """Is what was built for one welcome good for another?"""
        return (welcome.seed, welcome.data) == (self._welcome.seed, self._welcome.data)

    def attach(self, connection: Connection) -> None:
        """Work over this connection from now on. The pool knows nothing of what the last one had brought."""
        self._connection = self._parcels.connection = connection
        self._strategy = "sync"
        self._travelling: list[Flat] = []  # updates that the network has not taken yet
        self._waited_s, self._is_waiting = 0.0, False
        self._inbox = Inbox(connection, self._trainer, self._parcels)
        connection.reader.allow(self._inbox.place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        length = len(self._samples) if self._samples is not None else None
        fingerprint = self._trainer.weights.fingerprint()
        connection.send(say.Ready(self._trainer.layout.describe(), length, self._problem, fingerprint))

    def close(self) -> None:
        self._parcels.close()

    def work(self) -> say.Stop:
        """Until the coordinator says stop; the user's errors are reported to it before they are raised here."""
        try:
            while True:
                self.serve_next()
        except Stopped as stopped:
            return stopped.stop
        except Left as left:
            self._say_goodbye(str(left))
            raise

    def serve_next(self) -> None:
        """One lease, as soon as it is here."""
        while not self._inbox.ready:
            self._inbox.hear(self._wait())
        self._serve(self._inbox.ready.popleft())

    def leave(self, why: str) -> None:
        """Called by a signal handler: hand in what is finished, or will be in a moment, and what is owed; then go."""
        if self._is_waiting:
            raise Left(why)
        self._leaving_why = why

    def _wait(self) -> say.Message:
        before = time.perf_counter()
        self._is_waiting = True
        if self._leaving_why:
            raise Left(self._leaving_why)
        message = self._connection.wait()
        self._is_waiting = False
        self._waited_s += time.perf_counter() - before
        return message

    def _say_goodbye(self, why: str) -> None:
        flat = Flat(self._trainer.layout, only_live=True)
        debt = self._parcels.debt(flat)
        self._connection.send(say.Leaving(why), *([debt] if debt is not None else []))
        self._connection.part(GOODBYE_S)

    def _serve(self, package: Package) -> None:
        work = package.work
        is_sync = work.strategy == "sync"
        if work.strategy != self._strategy:
            self._change_to(work.strategy)
        started = self._looked_at = self._began_at = time.perf_counter()
        try:
            total, losses = self._compute(package)
            if is_sync:
                self._look_up()
        except Unwanted:
            return
        except Enough:
            raise Left(self._leaving_why) from None
        except TrainingFailed as error:
            self._connection.send(say.Failed(work.lease, self._batch, str(error), error.details))
            self._connection.drain()
            return
        ended = time.perf_counter()
        speeds = self._parcels.speeds(work.wants_speeds, total) if work.wants_speeds else None
        update = say.Update(
            lease=work.lease,
            losses=losses,
            touched=total.touched.to_bytes(len(total.trainable) // 8 + 1, "little"),
            compute_s=ended - started,
            codec_s=self._parcels.codec_s,
            network_s=self._waited_s,
            rss_bytes=self._rss_bytes(ended),
            codec=work.reply_codec,
            received_nbytes=package.received_nbytes,
            received_s=package.received_s,
            speeds=speeds,
            distracted_s=package.distracted_s,
        )
        self._waited_s = self._parcels.codec_s = 0.0
        reach("node.before_send")
        self._parcels.send(update, total)
        if self._connection.has_unsent:
            self._travelling.append(total)
        else:
            self._trainer.release(total)

    def _compute(self, package: Package) -> tuple[Flat, list[float]]:
        """The lease's gradient sum, or, where this node makes steps of its own, what they changed."""
        work, places = package.work, package.places
        batch_at = self._fetcher(package, places)
        if self._local is not None and work.strategy == "local":
            self._rebase()
            losses = self._local.train(places, batch_at, work.group, self._goes_on)
            self._finish_sending()
            return self._local.delta(), losses
        if self._inbox.has_new_weights:
            self._inbox.has_new_weights = False
            self._trainer.weights_changed()
        if work.strategy == "sync":
            return self._trainer.compute(places, batch_at)
        total, losses = self._passes.sum(places, batch_at)
        self._finish_sending()
        return self._trainer.to_host(total), losses

    def _change_to(self, strategy: str) -> None:
        """Only in `sync` does this node wait for the network. Steps of its own begin where the pool is."""
        self._connection.drain()
        self._connection.stream.set_blocking(strategy == "sync")
        if "local" in (strategy, self._strategy):
            self._parcels.forget_debts()
        self._strategy = strategy
        if strategy == "local":
            self._trainer.weights_changed()
            self._local = self._local or LocalTraining(self._job, self._trainer, self._passes, self._welcome.seed)
            self._local.begin()

    def _goes_on(self, done: int, of: int) -> bool:
        """Between two steps of this node's own: are there new weights? And should it make another one?"""
        self._rebase()
        return not self._must_go(done, of)

    def _must_go(self, done: int, of: int) -> bool:
        """Is it time to leave, and would the rest of the lease take too long?"""
        if not self._leaving_why:
            return False
        batch_s = (time.perf_counter() - self._began_at) / max(done, 1)
        return not done or batch_s * (of - done) > FINISH_S

    def _rebase(self) -> None:
        """Between two steps of this node's own: are there new weights?"""
        if self._inbox.has_new_weights and self._local is not None:
            self._inbox.has_new_weights = False
            self._local.rebase()

    def _finish_sending(self) -> None:
        """Nobody gets further ahead of the network than by one update."""
        self._connection.drain()
        while self._travelling:
            self._trainer.release(self._travelling.pop())

    def _fetcher(self, package: Package, places: list[Place]) -> Callable[[int], Any]:
        """What gives the lease's i-th batch."""
        work, samples = package.work, self._samples
        streamed = unpack(work.batches, package.batches) if work.batches is not None else None
        starts = [8 * start for start in accumulate(work.sizes, initial=0)]

        def batch_at(i: int) -> Any:
            self._batch = i
            if work.strategy != "local" and self._must_go(i, len(places)):
                raise Enough(self._leaving_why)
            self._look_up(LOOK_UP_S if work.strategy == "sync" else LOOK_OFTEN_S)
            if streamed is not None:
                return streamed[i]
            if samples is None:
                raise ProtocolError("no data", "sample ids for a node without a data set")
            ids = torch.frombuffer(package.ids, dtype=torch.int64, count=work.sizes[i], offset=starts[i])
            return samples.batch(ids, self._trainer.seed_of(places[i].step, places[i].batch))

        return batch_at

    def _look_up(self, every_s: float = LOOK_UP_S) -> None:
        """In a long lease, see now and then what the coordinator has to say; in `sync` that can only be goodbye."""
        now = time.perf_counter()
        if now - self._looked_at <= every_s:
            return
        self._looked_at = now
        if every_s != LOOK_UP_S:
            self._inbox.look()
        elif self._connection.has_input():
            raise Unwanted("the coordinator has something else to say")

    def _rss_bytes(self, now: float) -> int:
        if now - self._rss[0] > RSS_EVERY_S:
            self._rss = (now, rss_bytes())
        return self._rss[1]
