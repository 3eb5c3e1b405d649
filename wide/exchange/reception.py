"""From a caller's first word until it may be given work: who it is, whether it was here before, how far away it is, and
what it has built. Knows peers and the door; knows no leases.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from wide.codec.layout import Flat, Layout
from wide.codec.pieces import MOST_PART_NBYTES
from wide.errors import Absent, NotRepeatable, ProtocolError, WideError
from wide.exchange import words
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.happenings import EvaluatorReady, Happening, Joined, PlanAsked, Ready
from wide.exchange.peer import Peer
from wide.exchange.probe import Probing
from wide.exchange.switchboard import Switchboard
from wide.telemetry.log import log
from wide.telemetry.totals import Traffic
from wide.wire import messages as say
from wide.wire.frames import Sink

EVALUATOR = -1  # its place among the nodes
CHECKERS, WATCHES = 2, 3  # so many nodes try the job before they begin; what all others are told
CHECK_S = 60.0  # for so long the others wait for them
HEADER_LIMIT = 1 << 20  # a model of 10,000 tensors describes itself in less


class Reception:
    """A node that comes back after its connection broke is the same node; its old connection is of no use any more.
    `traffic` is what each node's connections have carried, by all of them.
    """

    def __init__(
        self,
        door: Door,
        board: Switchboard,
        layout: Layout,
        weights: Flat,
        feed: Feed,
        common: Common,
        traffic: dict[int, Traffic],
        now: Callable[[], float],
    ) -> None:
        self._now = now
        self._door, self._board, self._feed, self._common = door, board, feed, common
        self._tensors, self._first_weights = layout.describe(), weights.fingerprint()
        self._live_nbytes = layout.live_nbytes
        self._payload_limit = max(layout.live_nbytes, MOST_PART_NBYTES)
        self._known: dict[str, int] = {}  # nodes by the key that only they know
        self.traffic = traffic
        self._checkers, self._is_checked = 0, False  # nodes that were asked to try the job; has one of them done so?
        self._asked, self._asked_at = 0, math.inf  # of them, all in all; when the first one was
        self._check = ""  # what the first of them found
        self.last_node = max(traffic, default=0)

    def hello(
        self, peer: Peer, hello: say.Hello, sink: Sink, dismiss: Callable[[Peer, WideError], None]
    ) -> Happening | None:
        """Let it in, or refuse it. What is to be told of that; then it is greeted."""
        if peer.node or peer.has_asked:
            raise ProtocolError("out of order", "a second hello")
        self._door.admit(hello)
        if hello.role == "planner":
            peer.has_asked = True
            return PlanAsked(peer)
        peer.is_evaluator = hello.role == "evaluator"
        number = EVALUATOR if peer.is_evaluator else self._known.get(hello.key, 0) if hello.key else 0
        if (former := self._board.peers.get(number)) is not None:
            dismiss(former, Absent("came back", "it came back by another connection"))
        if not number:
            number = self.last_node = self.last_node + 1
        peer.node, peer.name = number, words.name(hello.name)
        self._board.seat(peer)
        peer.connection.reader.allow(sink, HEADER_LIMIT, self._payload_limit)
        return None if peer.is_evaluator else self._register(peer, hello)

    def _register(self, peer: Peer, hello: say.Hello) -> Joined:
        if hello.key:
            self._known[hello.key] = peer.node
        peer.is_on_this_machine = self._door.is_here(hello, peer.address)
        peer.machine, peer.cores = hello.machine, hello.cores
        peer.is_alike = hello.build == self._door.build
        if not peer.is_alike:
            theirs, ours = words.line(hello.build), self._door.build
            log.warning("node %s runs on %s, this coordinator on %s: bits may differ", peer.name, theirs, ours)
        traffic = peer.traffic = self.traffic.setdefault(peer.node, Traffic())
        peer.bytes_before = (traffic.bytes_sent, traffic.bytes_received, traffic.raw_bytes)
        peer.is_checker = self._door.checks and self._checkers < CHECKERS
        self._checkers += peer.is_checker
        return Joined(peer.node, peer.name, words.name(hello.host), hello.pid)

    def greet(self, peer: Peer, now: float) -> None:
        """Tell it how to build what is trained, and begin to measure its link."""
        checks = 1 + self._asked % CHECKERS if peer.is_checker else WATCHES if self._door.checks else 0
        self._asked += peer.is_checker
        self._asked_at = min(self._asked_at, now) if peer.is_checker else self._asked_at
        memory = self._common.greeting(self._live_nbytes) if peer.is_on_this_machine else None
        door = self._door
        self._board.send(peer, say.Welcome(peer.node, door.seed, door.data, checks, list(door.moved), memory))
        if not peer.is_evaluator and not peer.is_closed:
            peer.probing = Probing()
            self._board.send(peer, say.Probe(), *peer.probing.next_load(now))

    def echoed(self, peer: Peer, now: float) -> bool:
        """A probe was said back. Was it the last one?"""
        probing = peer.probing
        if probing is None or probing.is_over:
            raise ProtocolError("out of order", "an echo of nothing")
        probing.echoed(now)
        load = probing.next_load(now)
        self._board.send(peer, say.Probe(is_last=probing.is_over), *load)
        return probing.is_over

    def ready(self, peer: Peer, ready: say.Ready) -> Happening:
        """Raises, if what the peer has built is not what the pool trains."""
        if peer.is_ready:
            raise ProtocolError("out of order", "a second ready")
        if peer.link.up is None and not peer.is_evaluator:
            raise ProtocolError("out of order", "ready before the probe was said back")
        self._door.check_model(ready, self._tensors)
        if peer.is_evaluator:
            peer.is_ready = True
            return EvaluatorReady()
        self._door.check_program(ready)
        probes = self._feed.probes if peer.is_alike else []  # elsewhere the same sample may round differently
        peer.has_data = self._door.has_data(ready, self._feed.schedule.samples, probes)
        if ready.check and peer.is_alike and peer.is_checker:
            self._check = self._check or ready.check
            if ready.check != self._check:
                raise NotRepeatable(
                    "this process computes other numbers for the same batch than another one did: model, loss or data "
                    "set depend on something outside the job (the time, the process, an unseeded generator)"
                )
        peer.shares_memory = peer.is_on_this_machine and self._common.is_seen_by(ready.memory)
        peer.is_ready = True
        self._is_checked |= peer.is_checker
        return Ready(peer.node, peer.has_data, peer.machine, peer.cores)

    @property
    def is_checking(self) -> bool:
        """Is the job being tried, and nobody has said yet that it can be trained?"""
        return self._checkers > 0 and not self._is_checked and self._now() - self._asked_at < CHECK_S

    def forget(self, peer: Peer) -> None:
        """If it was to try the job and did not get there, the next one will."""
        self._checkers -= peer.is_checker and not peer.is_ready

    def has_first_weights(self, ready: say.Ready) -> bool:
        """Has it built just the weights that the pool begins with?"""
        return ready.weights == self._first_weights
