"""From a caller's first word until it may be given work: who it is, whether it was here before, how far away it is, and
what it has built. Knows peers and the door; knows no leases.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from wide.codec.layout import Flat, Layout
from wide.codec.pieces import MOST_PART_NBYTES
from wide.errors import Absent, NotRepeatable, NotYet, ProtocolError, Refused, VersionMismatch, WideError
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.gate import Bucket
from wide.exchange.happenings import Enrolled, EvaluatorReady, Happening, Joined, PlanAsked, Ready
from wide.exchange.peer import Peer
from wide.exchange.probe import LOAD, PROBE_NBYTES, Probing
from wide.exchange.switchboard import Switchboard
from wide.telemetry.clock import Clock
from wide.telemetry.log import log
from wide.telemetry.totals import Traffic
from wide.wire import messages as say
from wide.wire import words
from wide.wire.frames import Destinations, Sink, no_payload
from wide.wire.proof import Credential, nonce, proof

ENROLS, ONLY_ASK = ("node", "visitor"), ("planner", "guest", "visitor")
EVALUATOR = -1  # its place among the nodes
CHECKERS, WATCHES = 2, 3  # so many nodes try the job before they begin; what all others are told
CHECK_S = 60.0  # for so long the others wait for them
MOST_NODES, NODES_PER_S = 256.0, 0.2  # that one machine may bring, and how many more in time
MOST_BUILDS = 32  # kinds of machines that are told of
MOST_ECHOES = 16  # for one visitor
HEADER_LIMIT = 1 << 20  # a model of 10,000 tensors describes itself in less

SENT_AWAY = "whoever runs the pool has sent this node away"


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
        clock: Clock,
    ) -> None:
        self._clock, self._now = clock, clock.now
        self._load = memoryview(bytearray(PROBE_NBYTES))  # what visitors send, which nobody reads
        self._door, self._board, self._feed, self._common = door, board, feed, common
        self._tensors, self._first_weights = layout.describe(), weights.fingerprint()
        self._live_nbytes = layout.live_nbytes
        self._payload_limit = max(layout.live_nbytes, MOST_PART_NBYTES)
        self._known: dict[tuple[str, str], int] = {}  # nodes by their machine, and the key that only they know
        self.sent_away: dict[int, str] = {}  # nodes that are not wanted any more, and why
        self.machines_sent_away: dict[str, str] = {}
        self.traffic = traffic
        self._checkers, self._is_checked = 0, False  # nodes that were asked to try the job; has one of them done so?
        self._asked, self._asked_at = 0, math.inf  # of them, all in all; when the first one was
        self._check = ""  # what the first of them found
        self._builds: set[str] = set()  # that were told of
        self._newcomers: dict[str, Bucket] = {}  # how many nodes a machine may bring
        self.last_node = max(traffic, default=0)

    def hello(
        self, peer: Peer, hello: say.Hello, sink: Sink, dismiss: Callable[[Peer, WideError], None]
    ) -> list[Happening]:
        """Let it in, or refuse it. What is to be told of that; then it is greeted."""
        if peer.node or peer.has_asked:
            raise ProtocolError("out of order", "a second hello")
        credential = self._door.admit(hello, peer.nonces, peer.connection.stream.binding, self._clock.wall())
        enrolled = self._prove(peer, hello, credential)
        if peer.is_closed:  # it was gone before it heard that
            return enrolled
        if hello.role in ONLY_ASK:
            return [*enrolled, *self._receive(peer, hello)]
        peer.is_evaluator = hello.role == "evaluator"
        number = EVALUATOR if peer.is_evaluator else self._known.get((peer.machine_id, hello.key), 0)
        if peer.machine_id in self.machines_sent_away:
            raise Refused(self.machines_sent_away[peer.machine_id])
        if number in self.sent_away:
            raise Refused(self.sent_away[number])
        if not peer.is_evaluator and self._door.likeness is not None:
            is_first = not any(node > 0 for node in self._board.peers)
            self._door.likeness.check(hello, hello.build == self._door.build, is_first)
        if (former := self._board.peers.get(number)) is not None:
            dismiss(former, Absent("came back", "it came back by another connection"))
        if not number:
            self._count(peer.machine_id)
            number = self.last_node = self.last_node + 1
        peer.node, peer.name = number, self._name(words.name(hello.name), number)
        self._board.seat(peer)
        peer.connection.reader.allow(sink, HEADER_LIMIT, self._payload_limit)
        return enrolled if peer.is_evaluator else [*enrolled, self._register(peer, hello)]

    def machine_of(self, node: int) -> str:
        """As which it was let in; "": by the pool's token, or it never was."""
        return next((machine for (machine, _), number in self._known.items() if machine and number == node), "")

    def _count(self, machine: str) -> None:
        """A machine may bring many nodes, but not without end: each is remembered."""
        now = self._now()
        bucket = self._newcomers.setdefault(machine, Bucket(NODES_PER_S, MOST_NODES, MOST_NODES, now))
        if machine and not bucket.take(now):
            raise NotYet("this machine brings too many nodes: one by one")

    def knock(self, peer: Peer, knock: say.Knock) -> None:
        """Somebody is there, and wants to know how to prove who it is."""
        if peer.nonces is not None:
            raise ProtocolError("out of order", "a second knock")
        if knock.protocol < say.OLDEST:
            raise VersionMismatch(f"you speak protocol {knock.protocol}, this pool {say.PROTOCOL}: update wide")
        challenge = say.Challenge(min(knock.protocol, say.PROTOCOL), nonce())
        peer.nonces = knock.nonce, challenge.nonce
        self._board.send(peer, challenge)
        peer.connection.protocol = challenge.protocol

    def _prove(self, peer: Peer, hello: say.Hello, credential: Credential) -> list[Happening]:
        """It has proven that it knows the secret, and is shown that we do. By an invite it becomes a machine."""
        assert peer.nonces is not None
        mine = proof(credential.secret, "pool", credential.name, peer.nonces, peer.connection.stream.binding)
        kind, _, name = credential.name.partition(" ")
        if kind != "invite" or hello.role not in ENROLS:
            peer.machine_id = name if kind == "machine" else ""
            self._board.send(peer, say.Known(mine))
            return []
        machine = self._door.guests.enrol(name)
        peer.machine_id = machine.name.partition(" ")[2]
        self._board.send(peer, say.Known(mine, peer.machine_id, machine.secret))
        return [Enrolled(peer.machine_id, words.name(hello.name), peer.address, name)]

    def _receive(self, peer: Peer, hello: say.Hello) -> list[Happening]:
        """Somebody who only asks."""
        peer.has_asked = True
        self._board.receive_visitor(peer)
        if hello.role == "planner":
            return [PlanAsked(peer)]
        if self._door.offer is None:
            raise Refused("this pool has nothing to show: join it with --job FILE")
        peer.connection.reader.allow(self._load_of, HEADER_LIMIT, PROBE_NBYTES)
        likeness = self._door.likeness
        isa = likeness.offered if likeness is not None else ""
        offer = msgspec.structs.replace(self._door.offer, at=self._clock.wall(), isa=isa)
        self._board.send(peer, offer, self._door.code)
        return []

    def _load_of(self, message: say.Message, nbytes: int) -> Destinations:
        """A visitor's echoes are loaded."""
        if not isinstance(message, say.Probe):
            return no_payload(message, nbytes)
        return (self._load[:nbytes],)

    def echo(self, peer: Peer, probe: say.Probe) -> None:
        """A visitor wants to know how wide the way is."""
        peer.echoes += 1
        if peer.echoes > MOST_ECHOES:
            raise ProtocolError("out of order", "too many echoes")
        self._board.send(peer, probe, LOAD if peer.echoes > MOST_ECHOES // 2 else b"")

    def _name(self, wish: str, number: int) -> str:
        """Two machines of one name would be taken for one."""
        taken = {peer.name for peer in self._board.peers.values() if peer.node != number}
        names = (wish, *(f"{wish}-{i}" for i in range(2, len(taken) + 3)))
        return next(name for name in names if name not in taken)

    def _register(self, peer: Peer, hello: say.Hello) -> Joined:
        if hello.key or peer.machine_id:
            self._known[peer.machine_id, hello.key or f"node {peer.node}"] = peer.node
        peer.is_on_this_machine = self._door.is_here(hello, peer.is_own)
        peer.machine, peer.cores = hello.machine, hello.cores
        peer.is_alike = hello.build == self._door.build
        if (
            not peer.is_alike
            and len(self._builds) < MOST_BUILDS
            and (theirs := words.line(hello.build)) not in self._builds
        ):
            self._builds.add(theirs)
            log.warning(
                "node %s runs on %s, this coordinator on %s: bits may differ", peer.name, theirs, self._door.build
            )
        traffic = peer.traffic = self.traffic.setdefault(peer.node, Traffic())
        peer.bytes_before = (traffic.bytes_sent, traffic.bytes_received, traffic.raw_bytes)
        peer.is_checker = self._door.checks and self._checkers < CHECKERS
        self._checkers += peer.is_checker
        host, build = words.name(hello.host), words.line(hello.build)
        return Joined(peer.node, peer.name, host, hello.pid, peer.machine_id, peer.address, build)

    def greet(self, peer: Peer, now: float) -> None:
        """Tell it how to build what is trained, and begin to measure its link."""
        checks = 1 + self._asked % CHECKERS if peer.is_checker else WATCHES if self._door.checks else 0
        self._asked += peer.is_checker
        self._asked_at = min(self._asked_at, now) if peer.is_checker else self._asked_at
        memory = self._common.greeting(self._live_nbytes) if peer.is_on_this_machine else None
        door = self._door
        moved, steps = list(door.moved), door.steps
        welcome = say.Welcome(peer.node, door.seed, door.data, checks, moved, memory, steps, door.every)
        self._board.send(peer, welcome)
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
        peer.has_data, problem = self._door.has_data(ready, self._feed.schedule.samples, probes)
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
        return Ready(peer.node, peer.has_data, peer.machine, peer.cores, words.line(problem), peer.machine_id)

    @property
    def is_checking(self) -> bool:
        """Is the job being tried, and nobody has said yet that it can be trained?"""
        is_asked = self._checkers > 0 and self._asked_at < math.inf
        return is_asked and not self._is_checked and self._now() - self._asked_at < CHECK_S

    def forget(self, peer: Peer) -> None:
        """If it was to try the job and did not get there, the next one will."""
        self._checkers -= peer.is_checker and not peer.is_ready

    def why_other_bits(self, build: str) -> str:
        """Of a node that has computed other bits than the pool: in which its build differs, or that it does not."""
        ours = self._door.build
        if build and build != ours:
            return f" (it computes with {build}, the pool with {ours})"
        return " (it computes with the same build as the pool: it is broken, or it does something else)"

    def has_first_weights(self, ready: say.Ready) -> bool:
        """Has it built just the weights that the pool begins with?"""
        return ready.weights == self._first_weights
