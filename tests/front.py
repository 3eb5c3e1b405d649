"""An exchange whose callers are in the same process, on a clock that only moves when told."""

from __future__ import annotations

import contextlib

from tests.greet import introduced
from tests.jobs import make
from wide.codec.digest import Digest
from wide.codec.encoders import Encoders
from wide.coordinator.master import Master
from wide.errors import ConnectionLost
from wide.exchange.delivery import Assignment
from wide.exchange.door import Door
from wide.exchange.exchange import Exchange
from wide.exchange.feed import Feed
from wide.exchange.goods import Goods
from wide.exchange.guests import Guests
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.telemetry.clock import Clock
from wide.transport.connection import Connection
from wide.transport.memory import MemoryHub, pair
from wide.wire import messages as say


class Caller(Connection):
    """The other end of a line, which keeps the last payload. `line` is the exchange's end of it."""

    def __init__(self, stream, line):
        super().__init__(stream, self._keep)
        self.reader.allow(self._keep, 1 << 20, 1 << 30)
        self.last, self.line = b"", line

    def _keep(self, message, nbytes):
        self.last = bytearray(nbytes)
        return [memoryview(self.last)] if nbytes else ()

    def heard(self):
        """All that was said to it, whether or not the line has ended since."""
        messages = []
        with contextlib.suppress(ConnectionLost):
            while True:
                messages.append(self.wait())
        return messages


class Front:
    """The exchange, and what happened there."""

    def __init__(self, compress="none", job=None, guests=None):
        job = job or make()
        samples = Samples(job, job.seed)
        schedule = Schedule(len(samples), job.batch_size, job.batches_per_step, job.seed)
        self.master = Master(job, build_model(job, job.seed), job.seed)
        self.now = 100.0
        self.hub = MemoryHub(lambda seconds, has_news: 0.0)
        self._feed, self._encoders = Feed(samples, schedule), Encoders(0)
        layout, weights, spare = self.master.layout, self.master.weights, self.master.spare
        goods = Goods(layout, weights, spare, self._feed, self._encoders, Digest(bytes(16)))
        door = Door(guests or Guests("token", "evaluator's"), job.seed, "auto", compress, "build")
        self.exchange = Exchange(self.hub, door, goods, Clock(lambda: self.now, lambda: self.now))

    def call(self):
        """Somebody who has said nothing yet."""
        ours, theirs = pair()
        self.hub.call(ours, "10.0.0.7:5")
        self.turn()
        return Caller(theirs, ours)

    def greeted(self, **changes):
        """Somebody who was let in, and has said its probes back."""
        caller = self.call()
        introduced(caller, self.turn, **changes)
        assert isinstance(caller.wait(), say.Known)
        assert isinstance(caller.wait(), say.Welcome)
        while not (probe := caller.wait()).is_last:
            caller.send(probe, caller.last)
            self.turn()
        return caller

    def member(self, **changes):
        """Somebody who can be given work."""
        caller = self.greeted(**changes)
        caller.send(say.Ready(self.master.layout.describe(), self._feed.schedule.samples))
        self.turn()
        return caller

    def lease(self, node, lease=1, batches=2):
        """The first batches of the run; what is asked of the node."""
        self.exchange.send_work(node, Assignment(lease, 0, batches, 0, 0, "sync"))

    def turn(self):
        """Everybody is heard."""
        for _ in range(4):
            self.exchange.turn(0.0)

    def tick(self, now):
        self.now = now
        self.exchange.tick(now)

    def happened(self, *kinds):
        """What happened of these kinds, and is told once."""
        found = [it for it in self.exchange.happenings if isinstance(it, kinds)]
        self.exchange.happenings.clear()
        return found

    def close(self):
        self._feed.close()
        self._encoders.close()
