"""A whole pool in one process: the real server and real nodes over the in-memory twin, on a clock that only moves when
told. Whenever a node waits for an answer, the server has its turn.
"""

from __future__ import annotations

from concurrent.futures import wait
from dataclasses import replace

import torch

from faults.disk import Disk, MemoryDb, MemoryWriter
from faults.liar import LyingSession
from wide.codec.digest import KEY_NBYTES, Digest
from wide.codec.encoders import Encoders
from wide.codec.speeds import PRIORS
from wide.config import resolve
from wide.coordinator import assembly, resume
from wide.coordinator.assembly import Course
from wide.coordinator.judging import Judge
from wide.coordinator.master import Master
from wide.coordinator.resume import Start
from wide.errors import ConnectionLost
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.guests import Guests
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.node.beside import Beside
from wide.node.greeting import Identity, introduce
from wide.node.inbox import Stopped
from wide.node.seat import Seat
from wide.node.session import Session
from wide.node.workbench import Workbench
from wide.telemetry.clock import Clock
from wide.transport.connection import Connection
from wide.transport.memory import MemoryHub, MemoryStream
from wide.wire import messages as say
from wide.wire.proof import of_token

TOKEN = "the pool's"
TURN_S = 0.01
MOST_TURNS = 20_000
CPU = torch.device("cpu")
ELSEWHERE = "203.0.113.9:1"


class Twin:
    """A coordinator; `disk` is what survives it."""

    def __init__(self, job, disk=None, is_open=True, evaluates=False, shares=False, asked=None, likeness=None, **given):
        self.common = Common(is_wanted=shares, smallest=0)
        self.job, self.disk, self.now = job, disk or Disk(), 100.0
        options = resolve({"strategy": "sync", "steps": 5} | given, {})
        samples = Samples(job, job.seed)
        schedule = Schedule(len(samples), job.batch_size, job.batches_per_step, job.seed)
        self.master = Master(job, build_model(job, job.seed), job.seed, allocate=self.common.allocate)
        db, start = MemoryDb(self.disk), Start()
        if (saved := self.disk.newest()) is not None:
            start = resume.restore(saved, schedule, self.master, "here")
        self.writer, clock = MemoryWriter(self.disk, db), Clock(lambda: self.now, lambda: self.now)
        course = Course(options, schedule, self.master, options.steps, db, self.writer, start, clock)
        judge = Judge(job, self.master.descent) if job.is_judged else None
        digest = Digest(bytes(KEY_NBYTES), job.goes_by)
        course = replace(course, asked=asked, stop=self._stop, judge=judge, digest=digest)
        self.hub = MemoryHub(lambda seconds, has_news: 0.0)
        door = Door(Guests(TOKEN, "evaluator's"), job.seed, options.data, options.codecs, "build", likeness=likeness)
        priors = lambda names, *_: {name: PRIORS[name] for name in names}  # noqa: E731
        parts = (self.hub, door, Feed(samples, schedule), Encoders(threads=0), is_open, evaluates)
        self.server = assembly.server(course, *parts, try_codecs=priors, common=self.common)
        self.run, self.exchange, self.pool = self.server.run, self.server.exchange, self.server.pool
        self._ticked_at = 0.0

    def _stop(self):
        self.run.stop_reason = "stopped by its owner"

    def turn(self, seconds=TURN_S):
        """Hear what was said, and let so much time pass."""
        self.now += seconds
        if (pending := self.server._queue._pending) is not None:
            wait([pending.work])  # what is done aside is done by now
        self.exchange.turn(0.0)
        self.server._take_happenings()
        if self.now - self._ticked_at >= 0.05:
            self._ticked_at = self.now
            self.server._tick(self.now, lambda: "")
            self.server._take_happenings()

    def call(self, address=ELSEWHERE):
        """Somebody's line to this coordinator, which has not said anything yet."""
        mine, theirs = Waiting(self), MemoryStream()
        mine.carry, theirs.carry = theirs.arrive, mine.arrive
        mine.on_close, theirs.on_close = theirs.hang_up, mine.hang_up
        self.hub.call(theirs, address)
        connection = Connection(mine)
        connection.sink = Sink()
        connection.reader.allow(connection.sink, 1 << 26, 1 << 30)
        return connection

    def join(self, name="atlas", job=None, is_beside=False, liar=None):
        """A node; `is_beside`: it runs on this machine; `liar`: what lies in its place (faults/lies.py)."""
        connection, job = self.call("127.0.0.1:9" if is_beside else ELSEWHERE), job or self.job
        welcome = introduce(connection, Identity(of_token(TOKEN), name, 1, CPU), job.threads)
        bench = Workbench(job, welcome, CPU)
        beside = Beside(bench.trainer.layout, welcome.memory)
        session = Session(connection, bench, beside) if liar is None else LyingSession(liar, connection, bench)
        session._seat = Seat(threads=2)  # takes none: this process has other things to do, too
        node = Node(self, connection, session, welcome.node)
        self.turn()
        return node

    def train(self, *nodes):
        """To the end of the run."""
        for _ in range(MOST_TURNS):
            if self.run.ended is not None and not self.server._evaluation.is_busy:
                self.writer.settle()
                return self.master.model
            for node in nodes:
                node.work()
            self.turn()
        raise AssertionError("it does not end")

    def rejects(self):
        self.run.record.db.settle()
        return self.disk.read("SELECT node, reason, detail FROM rejects")

    def ledger(self):
        self.run.record.flush(force=True)
        self.run.record.db.settle()
        return self.disk.read("SELECT step, first_batch, last_batch, node FROM ledger ORDER BY step, first_batch")


class Sink:
    """Keeps the last payload."""

    last = bytearray()

    def __call__(self, message, nbytes):
        self.last = bytearray(nbytes)
        return [memoryview(self.last)] if nbytes else []


class Waiting(MemoryStream):
    """Whoever waits for something on it gives the coordinator its turn."""

    def __init__(self, twin):
        super().__init__()
        self._twin = twin

    def wait(self, reading, writing, timeout_s=None):
        for _ in range(MOST_TURNS):
            if not reading or self.has_input():
                return
            self._twin.turn()
        raise ConnectionLost("nothing comes")


class Node:
    """A real session at the other end of a line."""

    def __init__(self, twin, connection, session, number):
        self.connection, self.session, self.number = connection, session, number
        self.stop, self._twin, self._beats_at = None, twin, 0.0

    def work(self):
        """One lease, if there is one that can be begun."""
        inbox = self.session._inbox
        try:
            if self.stop is None:
                for message in self.connection.poll():
                    inbox.hear(message)
            if self.stop is None and inbox.ready:
                self.session.serve_next()
            elif self.stop is None and self._twin.now >= self._beats_at:
                self._beats_at = self._twin.now + say.BEAT_S
                self.connection.send(say.Alive())
        except Stopped as stopped:
            self.stop = stopped.stop
        except ConnectionLost:
            self.stop = say.Stop("gone", 69)

    def hang_up(self):
        self.connection.close()
        self.stop = say.Stop("it hung up", 0)
