"""A node's conversation with its coordinator: hello, build, then work until told to stop. Knows no processes."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wide.codec.batch import unpack
from wide.errors import BY_EXIT_CODE, ConnectionLost, ProtocolError, TrainingFailed, UsageError, WideError
from wide.job.definition import Job
from wide.job.samples import Samples
from wide.node.trainer import Assignment, Trainer
from wide.telemetry.log import log
from wide.telemetry.process import build, rss_bytes
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.frames import Destinations

HEADER_LIMIT = 64 << 20
PAYLOAD_LIMIT = 1 << 40  # a node trusts its coordinator
RSS_EVERY_S = 1.0
LOOK_UP_S = 0.1


@dataclass(frozen=True)
class Identity:
    """How a node introduces itself."""

    token: str
    name: str
    pid: int
    device: torch.device
    role: str = "node"


def pick_device(wish: str, index: int = 0) -> torch.device:
    """`auto` takes a GPU if there is one; the nodes of one machine take turns over its GPUs."""
    if wish != "auto":
        device = torch.device(wish)
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            raise UsageError(f"--device {wish}: there is no such device on this machine; --device auto takes what is")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def introduce(connection: Connection, identity: Identity, threads: int) -> say.Welcome:
    hello = say.Hello(
        identity.token,
        identity.role,
        identity.name,
        socket.gethostname(),
        identity.pid,
        build(identity.device, threads),
    )
    connection.send(hello)
    welcome = connection.wait()
    if isinstance(welcome, say.Stop):
        raise BY_EXIT_CODE.get(welcome.exit_code, WideError)(welcome.why)
    if not isinstance(welcome, say.Welcome):
        raise ProtocolError("out of order", f"expected a welcome, got {type(welcome).__name__}")
    return welcome


class Unwanted(WideError):
    """The lease at hand is no longer of interest: most likely the run is over."""


class Worker:
    """Computes leases, one after the other."""

    def __init__(self, connection: Connection, job: Job, welcome: say.Welcome, device: torch.device) -> None:
        self._connection = connection
        self._samples: Samples | None = None
        self._ids = bytearray()  # of the lease at hand
        self._batches = torch.empty(0, dtype=torch.uint8)  # or these, if they are streamed
        self._waited_s = 0.0
        self._looked_at = 0.0
        self._rss = (0.0, 0)
        problem = ""
        if welcome.data != "stream":
            try:
                self._samples = Samples(job, welcome.seed)
            except TrainingFailed as error:
                problem = str(error)
        self._trainer = Trainer(job, welcome.seed, device)
        connection.reader.allow(self._place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        length = len(self._samples) if self._samples is not None else None
        connection.send(say.Ready(self._trainer.layout.describe(), length, problem))

    def work(self) -> say.Stop:
        """Until the coordinator says stop; the user's errors are reported to it before they are raised here."""
        while True:
            before = time.perf_counter()
            message = self._connection.wait()
            self._waited_s += time.perf_counter() - before
            if isinstance(message, say.Work):
                self._compute(message)
            elif isinstance(message, say.Stop):
                return message
            else:
                raise ProtocolError("out of order", f"{type(message).__name__} is not for nodes")

    def _place_for(self, message: say.Message, nbytes: int) -> Destinations:
        """Weights go straight into the model's own buffer, data into memory made for this lease."""
        if not isinstance(message, say.Work):
            if nbytes:
                raise ProtocolError("unexpected payload", f"{type(message).__name__} must not carry a payload")
            return ()
        weights = self._trainer.weights.bytes[: message.weights_nbytes]
        if len(weights) != message.weights_nbytes or nbytes < len(weights):
            raise ProtocolError("wrong payload", f"{message.weights_nbytes} bytes of weights")
        if message.batches is None:
            self._ids = bytearray(nbytes - len(weights))
            return (weights, memoryview(self._ids))
        self._batches = torch.empty(nbytes - len(weights), dtype=torch.uint8)
        return (weights, self._batches.numpy().data)

    def _compute(self, work: say.Work) -> None:
        started = self._looked_at = time.perf_counter()
        if work.weights_nbytes:
            self._trainer.weights_changed()
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
        touched = total.touched.to_bytes(len(total.trainable) // 8 + 1, "little")
        update = say.Update(work.lease, losses, touched, ended - started, 0.0, self._waited_s, self._rss_bytes(ended))
        self._waited_s = 0.0
        self._connection.send(update, total.bytes)
        self._trainer.release(total)

    def _fetcher(self, work: say.Work) -> Callable[[int], Any]:
        """What gives the lease's i-th batch."""
        streamed = unpack(work.batches, self._batches) if work.batches is not None else None
        samples, offset_nbytes = self._samples, 0

        def batch_at(i: int) -> Any:
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


def lend(connection: Connection, identity: Identity, load: Callable[[], Job]) -> say.Stop:
    """A whole life: greet, build, work. Whatever fails is told to the coordinator, then raised."""
    try:
        job = load()
        torch.set_num_threads(job.threads)
        welcome = introduce(connection, identity, job.threads)
        log.info("joined as node %d", welcome.node)
        try:
            return Worker(connection, job, welcome, identity.device).work()
        except TrainingFailed as error:
            connection.send(say.Failed(0, -1, str(error), error.details))
            raise
    except ConnectionLost as error:
        raise ConnectionLost(f"the coordinator went away: {error}") from None
