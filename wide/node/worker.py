"""A node's life: build what is to be trained, then work until told to stop. Knows no processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from wide.codec.batch import unpack
from wide.codec.ladder import RAW
from wide.codec.layout import Flat
from wide.errors import ConnectionLost, ProtocolError, TrainingFailed, WideError
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT, Identity, introduce
from wide.node.parcels import Interruption, Parcels
from wide.node.trainer import Assignment, Trainer
from wide.telemetry.log import log
from wide.telemetry.process import rss_bytes
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.frames import Destinations, no_payload

RSS_EVERY_S = 1.0
LOOK_UP_S = 0.1


class Unwanted(WideError):
    """The lease at hand is no longer of interest: most likely the run is over."""


class Left(WideError):
    """This machine wants to leave the pool."""


class Worker:
    """Computes leases, one after the other."""

    def __init__(self, connection: Connection, job: Job, welcome: say.Welcome, device: torch.device) -> None:
        self._connection = connection
        self._samples: Samples | None = None
        self._ids = bytearray()  # of the lease at hand
        self._batches = torch.empty(0, dtype=torch.uint8)  # or these, if they are streamed
        self._waited_s = 0.0
        self._arriving = (0.0, 0)  # since when a work's payload has been coming, and the bytes that had come by then
        self._has_weights = False
        self._leaving_why = ""
        self._is_waiting = False
        self._looked_at = 0.0
        self._rss = (0.0, 0)
        problem = ""
        if welcome.data != "stream":
            try:
                self._samples = Samples(job, welcome.seed)
            except TrainingFailed as error:
                problem = str(error)
        self._trainer = Trainer(job, welcome.seed, device)
        self._parcels = Parcels(connection, self._trainer, self._wait)
        connection.reader.allow(self._place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        length = len(self._samples) if self._samples is not None else None
        connection.send(say.Ready(self._trainer.layout.describe(), length, problem))

    def work(self) -> say.Stop:
        """Until the coordinator says stop; the user's errors are reported to it before they are raised here."""
        try:
            while True:
                message = self._wait()
                if isinstance(message, say.Stop):
                    return message
                if not isinstance(message, say.Work):
                    raise ProtocolError("out of order", f"{type(message).__name__} is not for nodes")
                self._serve(message)
        except Interruption as interruption:
            if isinstance(interruption.message, say.Stop):
                return interruption.message
            raise ProtocolError("out of order", str(interruption)) from None
        except Left as left:
            self._say_goodbye(str(left))
            raise
        finally:
            self._parcels.close()

    def leave(self, why: str) -> None:
        """Called by a signal handler: stop at the next batch, hand in what is owed, and go."""
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

    def _place_for(self, message: say.Message, nbytes: int) -> Destinations:
        """Weights go straight into the model's own buffer, data into memory made for this lease."""
        if not isinstance(message, say.Work):
            return (self._parcels.place_for(nbytes),) if isinstance(message, say.Part) else no_payload(message, nbytes)
        self._arriving = (time.perf_counter(), self._connection.bytes_received)
        weights = self._trainer.weights.bytes[: message.weights_nbytes]
        if len(weights) != message.weights_nbytes or nbytes < len(weights):
            raise ProtocolError("wrong payload", f"{message.weights_nbytes} bytes of weights")
        if message.batches is None:
            self._ids = bytearray(nbytes - len(weights))
            return (weights, memoryview(self._ids))
        data_nbytes = sum(run[0] for run in message.runs)
        if nbytes - len(weights) != (data_nbytes if message.batches_codec == RAW else 0):
            raise ProtocolError("wrong payload", f"{nbytes} bytes for {data_nbytes} bytes of batches")
        self._batches = torch.empty(data_nbytes, dtype=torch.uint8)
        return (weights, self._batches.numpy().data) if message.batches_codec == RAW else (weights,)

    def _serve(self, work: say.Work) -> None:
        received = self._receive(work)
        self._compute(work, received)

    def _receive(self, work: say.Work) -> tuple[int, float]:
        """What comes in parts. Returns how many bytes all came in how long, after those that came first."""
        if work.is_refused:
            self._parcels.refused()
        if work.weights_codecs:
            self._parcels.take_weights(work, is_first=not self._has_weights)
        if work.batches is not None and work.batches_codec != RAW:
            self._parcels.take_batches(work, self._batches)
        since, nbytes_before = self._arriving
        received = self._connection.bytes_received - nbytes_before, time.perf_counter() - since
        if work.weights_codecs or work.weights_nbytes:
            self._has_weights = True
            self._trainer.weights_changed()
        return received

    def _compute(self, work: say.Work, received: tuple[int, float]) -> None:
        started = self._looked_at = time.perf_counter()
        assignment = Assignment(work.step, work.first, work.sizes, work.step_samples)
        try:
            total, losses = self._trainer.compute(assignment, self._fetcher(work))
            self._look_up()
        except Unwanted:
            return
        except TrainingFailed as error:
            self._connection.send(say.Failed(work.lease, self._trainer.batch, str(error), error.details))
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
            received_nbytes=received[0],
            received_s=received[1],
            speeds=speeds,
        )
        self._waited_s = self._parcels.codec_s = 0.0
        self._parcels.send(update, total)
        self._trainer.release(total)

    def _fetcher(self, work: say.Work) -> Callable[[int], Any]:
        """What gives the lease's i-th batch."""
        streamed = unpack(work.batches, self._batches) if work.batches is not None else None
        samples, offset_nbytes = self._samples, 0

        def batch_at(i: int) -> Any:
            if self._leaving_why:
                raise Left(self._leaving_why)
            self._look_up()
            if streamed is not None:
                return streamed[i]
            if samples is None:
                raise ProtocolError("no data", "sample ids for a node without a data set")
            nonlocal offset_nbytes
            ids = torch.frombuffer(self._ids, dtype=torch.int64, count=work.sizes[i], offset=offset_nbytes)
            offset_nbytes += ids.nbytes
            return samples.batch(ids, self._trainer.seed_of(work.step, work.first + i))

        return batch_at

    def _look_up(self) -> None:
        """In a long lease, see now and then whether the coordinator has changed its mind."""
        now = time.perf_counter()
        if now - self._looked_at > LOOK_UP_S:
            self._looked_at = now
            if self._connection.has_input():
                raise Unwanted("the coordinator has something else to say")

    def _rss_bytes(self, now: float) -> int:
        if now - self._rss[0] > RSS_EVERY_S:
            self._rss = (now, rss_bytes())
        return self._rss[1]


def lend(
    connection: Connection,
    identity: Identity,
    load: Callable[[], Job],
    begun: Callable[[Worker], None] = lambda worker: None,
) -> say.Stop:
    """A whole life: greet, build, work. Whatever fails is told to the coordinator, then raised.

    `begun` is given the worker, which can then be asked to leave.
    """
    try:
        job = load()
        torch.set_num_threads(job.threads)
        welcome = introduce(connection, identity, job.threads)
        log.info("joined as node %d", welcome.node)
        try:
            worker = Worker(connection, job, welcome, identity.device)
            begun(worker)
            return worker.work()
        except TrainingFailed as error:
            connection.send(say.Failed(0, -1, str(error), error.details))
            raise
    except ConnectionLost as error:
        raise ConnectionLost(f"the coordinator went away: {error}") from None
