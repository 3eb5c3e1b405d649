"""A node's time with a pool, over one connection: take work, look up now and then, hand in. Knows messages and time;
what is computed is the training's (training.py).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from wide.codec.batch import unpack
from wide.codec.layout import Flat
from wide.errors import Left, NotRepeatable, ParametersMoved, ProtocolError, TrainingFailed, WideError
from wide.failpoint import is_spoilt, reach
from wide.job.here import Here
from wide.node.ahead import Ahead
from wide.node.beside import Beside
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT
from wide.node.inbox import Inbox, Package, Stopped
from wide.node.seat import Seat
from wide.node.trainer import Enough, Place
from wide.node.workbench import Workbench
from wide.strategy.catalogue import EXACT, STRATEGIES
from wide.telemetry.log import log
from wide.telemetry.process import rss_bytes
from wide.transport.connection import Connection
from wide.wire import messages as say

RSS_EVERY_S = 1.0
LOOK_UP_S = 0.1
LOOK_OFTEN_S = 0.005  # where messages travel while batches are computed
IDLE_S = 2.0
FINISH_S = 2.0  # a lease that will be done within this is finished before its node leaves
GOODBYE_S = 2.0


Content = tuple[torch.Tensor, int, Here]


class Unwanted(WideError):
    """The lease at hand is no longer of interest: the run is over."""


class Session:
    """Computes leases, one after the other. A pool that was joined anew knows nothing of what the last session had."""

    def __init__(self, connection: Connection, bench: Workbench, beside: Beside | None = None) -> None:
        beside = beside or Beside(bench.trainer.layout, None)
        self._connection, self._bench, self._beside = connection, bench, beside
        self._inbox = Inbox(connection, bench.trainer, bench.payloads, beside)
        self._strategy, self._training = EXACT, bench.training(EXACT.name)
        self.batches = self.samples = 0  # that were handed in
        self._is_told = False  # that batches are streamed to this machine
        self._travelling: list[Flat] = []  # updates that the network has not taken yet
        self._waited_s, self._is_waiting = 0.0, False
        self._fetch_s = 0.0  # until the lease's batches were there
        self._looked_at = self._began_at = 0.0
        self._batch = -1  # which batch of the lease is being computed: for messages about failures
        self._leaving_why = ""
        self._streamed: list[Any] | None = None  # the batches of the lease at hand
        self._fetched: tuple[int, Any] | None = None  # a lease whose first batch was fetched ahead, and that batch
        self._ahead = Ahead(bench.workers, self._contents) if bench.workers is not None else None
        self._seat = Seat(bench.trainer.job.threads)
        self._rss = (0.0, 0)
        bench.trainer.expect_all()
        connection.reader.allow(self._inbox.place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        connection.send(bench.describe(beside.proof))

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
        finally:
            self._seat.leave()

    def serve_next(self) -> None:
        """One lease, as soon as it is here."""
        idle_since = time.monotonic()
        while not self._inbox.ready:
            if self._ahead is not None:
                self._ahead.look(self._inbox.ahead)
            elif self._inbox.ahead and self._fetched is None:
                self._fetch_ahead(self._inbox.ahead[0])
            self._inbox.hear(self._wait())
            if self._strategy is EXACT and not self._inbox.ready and time.monotonic() - idle_since > IDLE_S:
                self._try_again()
        self._serve(self._inbox.ready.popleft())

    def _try_again(self) -> None:
        """There is nothing to do: does the job still give the same numbers twice?"""
        self._fetched = None
        try:
            self._bench.try_again()
        except NotRepeatable as error:
            self._connection.send(say.Failed(0, -1, str(error), error.details, is_everywhere=True))

    def _fetch_ahead(self, package: Package) -> None:
        """The first batch of what will be computed next. Only one, and only if no other is fetched in between: a
        collate may use its memory again.
        """
        if package.work.batches is None:
            try:
                self._fetched = package.work.lease, self._batch_of(package, package.places[0], 0, 0)
            except TrainingFailed:
                self._fetched = package.work.lease, None  # it will fail again, where it can be told which batch it was

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
        flat = Flat(self._bench.trainer.layout, only_live=True)
        debt = self._bench.payloads.debt(flat)
        self._connection.send(say.Leaving(why), *([debt] if debt is not None else []))
        self._connection.part(GOODBYE_S)

    def _serve(self, package: Package) -> None:
        work = package.work
        if work.strategy != self._strategy.name:
            self._change_to(work.strategy)
        self._seat.take(work.core)
        started = self._looked_at = self._began_at = time.perf_counter()
        if self._ahead is not None:
            self._ahead.look([package, *self._inbox.ready, *self._inbox.ahead])
        try:
            losses = self._train(package)
            self._bench.look_around(self._streamed, time.perf_counter() - started)
            self._streamed = None
            if not self._strategy.overlaps:
                self._look_up()
            else:
                self._finish_sending()
            total = self._training.result()
        except Unwanted:
            return
        except Enough:
            raise Left(self._leaving_why) from None
        except TrainingFailed as error:
            if self._bench.is_own_loop:  # it fails here, and perhaps nowhere else
                hint = ": leave that to the pool, which makes the steps" if isinstance(error, ParametersMoved) else ""
                raise Left(f"{error}{hint}") from None
            moved = error.names if isinstance(error, ParametersMoved) else []
            is_everywhere = isinstance(error, NotRepeatable)
            failed = say.Failed(work.lease, self._batch, str(error), error.details, is_everywhere, moved)
            self._connection.send(failed)
            self._connection.drain()
            return
        finally:
            if self._ahead is not None:
                self._ahead.done(work.lease)
        self._hand_in(package, total, losses, time.perf_counter() - started)

    def _train(self, package: Package) -> list[float]:
        places, work = package.places, package.work
        room = self._beside.room(work.update_at) if work.update_at is not None else None
        self._take_new_weights()
        if work.rates:
            self._training.use_rates(work.rates)
        return self._training.train(places, self._fetcher(package, places), work.group, self._goes_on, room)

    def _hand_in(self, package: Package, total: Flat, losses: list[float], compute_s: float) -> None:
        work, payloads = package.work, self._bench.payloads
        payloads.use(self._strategy.update_role)
        speeds = payloads.speeds(work.wants_speeds, total) if work.wants_speeds else None
        norm = total.norm() if work.update_at is not None else 0.0  # else whoever receives it looks through it
        update = say.Update(
            lease=work.lease,
            losses=losses,
            touched=total.touched.to_bytes(len(total.trainable) // 8 + 1, "little"),
            compute_s=compute_s,
            codec_s=payloads.codec_s,
            network_s=self._waited_s,
            rss_bytes=self._rss_bytes(),
            codec=work.reply_codec,
            received_nbytes=package.received_nbytes,
            received_s=package.received_s,
            speeds=speeds,
            distracted_s=package.distracted_s,
            is_finite=math.isfinite(norm),
            fetch_s=self._fetch_s,
            decode_s=payloads.decode_s,
            weights=total.weights,
            logged=total.logged,
            norm=min(norm, say.MOST_LOSS) if math.isfinite(norm) else 0.0,
        )
        self._waited_s = payloads.codec_s = payloads.decode_s = self._fetch_s = 0.0
        reach("node.before_send")
        if is_spoilt("node.update"):
            total.raw[0] ^= 1
        room = self._beside.room(work.update_at) if work.update_at is not None else None
        payloads.send(self._connection, update, total, room)
        self.batches += len(losses)
        self.samples += sum(work.sizes[: len(losses)])
        if total is room:
            return
        if self._connection.has_unsent:
            self._travelling.append(total)
        else:
            self._bench.trainer.release(total)

    def _change_to(self, name: str) -> None:
        """Only where updates do not overlap with computing does this node wait for the network."""
        self._strategy = STRATEGIES[name]
        self._connection.drain()
        self._connection.stream.set_blocking(not self._strategy.overlaps)
        self._training = self._bench.training(name)
        self._training.begin()

    def _goes_on(self, done: int, of: int) -> bool:
        """Between two steps of this node's own: are there new weights? And should it make another one?"""
        self._take_new_weights()
        return not self._must_go(done, of)

    def _must_go(self, done: int, of: int) -> bool:
        """Is it time to leave, and would the rest of the lease take too long?"""
        if not self._leaving_why:
            return False
        batch_s = (time.perf_counter() - self._began_at) / max(done, 1)
        return not done or batch_s * (of - done) > FINISH_S

    def _take_new_weights(self) -> None:
        if self._inbox.has_new_weights:
            self._inbox.has_new_weights = False
            self._training.new_weights()

    def _finish_sending(self) -> None:
        """Nobody gets further ahead of the network than by one update."""
        self._connection.drain()
        while self._travelling:
            self._bench.trainer.release(self._travelling.pop())

    def _fetcher(self, package: Package, places: list[Place]) -> Callable[[int], Any]:
        """What gives the lease's i-th batch."""
        work = package.work
        streamed = None
        if work.batches is not None and package.batches is not None:
            streamed = unpack(work.batches, package.batches)
            if not self._is_told:
                self._is_told = True
                log.info("the pool streams its data to this machine%s", self._bench.why_streamed)
            self._bench.try_batches(streamed)
        self._streamed = streamed
        starts = [8 * start for start in accumulate(work.sizes, initial=0)]
        every_s = LOOK_OFTEN_S if self._strategy.overlaps or self._ahead is not None else LOOK_UP_S
        lease, first = self._fetched or (0, None)
        self._fetched = None

        def look() -> None:
            if self._leaving_why and self._training.fetches_all and self._must_go(self._batch, len(places)):
                raise Enough(self._leaving_why)
            self._look_up(every_s)

        def batch_at(i: int) -> Any:
            self._batch = i
            look()
            if streamed is not None:
                return streamed[i]
            if i == 0 and lease == work.lease and first is not None:
                return first
            before = time.perf_counter()
            if self._ahead is not None:
                batch = self._ahead.take(work.lease, i, look)
            else:
                batch = self._batch_of(package, places[i], i, starts[i])
            self._fetch_s += time.perf_counter() - before
            return batch

        return batch_at

    def _batch_of(self, package: Package, place: Place, i: int, start_nbytes: int) -> Any:
        samples = self._bench.samples
        if samples is None:
            raise ProtocolError("no data", "sample ids for a node without a data set")
        return samples.batch(*self._content(package, place, i, start_nbytes))

    def _content(self, package: Package, place: Place, i: int, start_nbytes: int) -> Content:
        """What a batch is made of, its seed, and where it is."""
        ids = torch.frombuffer(package.ids, dtype=torch.int64, count=package.work.sizes[i], offset=start_nbytes)
        trainer = self._bench.trainer
        return ids, trainer.seed_of(place.step, place.batch), trainer.here(place)

    def _contents(self, package: Package) -> list[Content]:
        starts = [8 * start for start in accumulate(package.work.sizes, initial=0)]
        return [self._content(package, place, i, starts[i]) for i, place in enumerate(package.places)]

    def _look_up(self, every_s: float = LOOK_UP_S) -> None:
        """In a long lease, see now and then what the coordinator has to say."""
        now = time.perf_counter()
        if now - self._looked_at <= every_s:
            return
        self._looked_at = now
        if self._strategy.overlaps:
            self._inbox.look()
        else:
            messages = self._connection.look()
            if any(isinstance(message, say.Stop) for message in messages):
                raise Unwanted("the coordinator says goodbye")
            if self._ahead is not None:
                self._ahead.look(self._inbox.coming(messages))

    def _rss_bytes(self) -> int:
        now = time.perf_counter()
        if now - self._rss[0] > RSS_EVERY_S:
            self._rss = (now, rss_bytes())
        return self._rss[1]
