"""One simulated machine: it speaks the real protocol, through the real inbox and payloads, over a line in memory. Only
its computing is a formula, and its time the world's.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections import deque
from typing import TYPE_CHECKING

from faults.toy import loss_of, toy_gradient
from wide.codec.encoders import Encoders
from wide.codec.layout import Flat, Layout
from wide.codec.memory import Name
from wide.errors import ConnectionLost, NotShared
from wide.node.beside import Beside
from wide.node.greeting import HEADER_LIMIT, PAYLOAD_LIMIT
from wide.node.inbox import Inbox, Package, Stopped
from wide.node.payloads import Payloads
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.tree import Block, halves
from wide.transport.connection import Connection
from wide.transport.introduction import Self, hello
from wide.transport.memory import MemoryStream
from wide.wire import messages as say
from wide.wire.frames import Destinations
from wide.wire.proof import NONCE_NBYTES, of_token

if TYPE_CHECKING:
    from faults.simulator import World

NONCE = bytes(NONCE_NBYTES)
BUILDING_S = 1.0
LIARS = 0.25  # of all nodes, where there are any


class Shelf:
    """Where this node keeps the weights."""

    def __init__(self, layout: Layout) -> None:
        self.layout, self.weights = layout, Flat(layout, only_live=False)

    def keep_versions(self) -> None:
        """Nothing but arriving versions ever changes them here."""


class Node:
    """A machine, and its connection of the moment."""

    def __init__(self, world: World, name: int, batches_per_s: float, up_s: float, down_s: float) -> None:
        self.world, self.name, self.key = world, name, f"key {name}"
        self.batches_per_s, self.up_s, self.down_s = batches_per_s, up_s, down_s
        self.has_data = world.chance.random() < 0.8
        self.is_beside = world.shares_memory and name % 2 == 0  # it sees the coordinator's memory
        self.machine = world.chance.choice(("", "", "a", "b"))  # of those that share one, two can work at a time
        self.is_dead = self.is_hung = self.is_leaving = False
        self.paused_until = self.cut_until = self.quiet_until = 0.0
        self.loses = False  # what is sent while it is cut off; else it arrives afterwards
        self.slowness = 1.0
        self.spoils = ""  # what is wrong with its next result
        self.lies = world.scenario.lies if world.other_chance.random() < LIARS else 0.0
        self.began_at = 0.0
        self.number = 0  # in the pool
        self.work: deque[Package] = deque()
        self.line: Line | None = None

    def __repr__(self) -> str:
        return f"<Node {self.name}, in the pool {self.number}>"

    @property
    def is_member(self) -> bool:
        return self.line is not None and self.line.inbox is not None

    def dial(self) -> None:
        """Connect, or try again later; a machine that is gone, or was told that all is over, does not."""
        world = self.world
        if self.is_dead or self.line is not None or world.is_over:
            return
        if not world.is_up or self.paused_until > world.now or self.cut_until > world.now:
            world.later(world.chance.uniform(0.2, 3.0), self.dial)
            return
        self.work.clear()
        self.number = 0
        self.line = Line(self)
        self.line.begin()

    def hang_up(self) -> None:
        if self.line is not None:
            self.line.close()

    def lost(self, why: str) -> None:
        """The connection is gone. Somebody comes again, sooner or later: the same process, or a new one. Until it looks
        up, it goes on with what it has in its hands.
        """
        is_same = self.line is not None and self.line.life == self.world.lives  # else those numbers are another's
        beside = self.line.beside if self.line is not None and is_same else None
        for name in [package.work.update_at for package in self.work]:
            with contextlib.suppress(NotShared):  # it had not looked at it yet
                if name is not None and beside is not None:
                    self.world.ghosts.append(beside.room(name))
        self.line = None
        self.world.note(f"{self!r} lost its connection: {why}")
        if self.world.chance.random() < 0.3:
            self.world.serial += 1
            self.key = f"key {self.name}.{self.world.serial}"
        if not (self.is_dead or self.is_leaving):
            self.world.later(self.world.chance.expovariate(0.5), self.dial)

    # ── work ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def take(self, package: Package) -> None:
        self.work.append(package)
        if len(self.work) == 1:
            self._compute()

    def _compute(self) -> None:
        world, package = self.world, self.work[0]
        self.began_at = max(world.now, self.paused_until)
        usual_s = len(package.work.sizes) / self.batches_per_s
        seconds = usual_s * self.slowness * world.chance.uniform(0.8, 1.2)
        world.at(self.began_at + seconds, self._computed, package, seconds)

    def _computed(self, package: Package, seconds: float) -> None:
        if self.is_dead or self.is_hung or self.line is None or not self.work or self.work[0] is not package:
            return
        if self.paused_until > self.world.now:
            self.world.at(self.paused_until, self._computed, package, seconds)
            return
        self.work.popleft()
        self.hand_in(package, len(package.work.sizes), seconds)
        if self.work:
            self._compute()

    def hand_in(self, package: Package, batches: int, seconds: float) -> None:
        """The first so many batches of a lease."""
        world, line, work = self.world, self.line, package.work
        if line is None:
            return
        spoils, self.spoils = self.spoils, ""
        places = package.places[:batches]
        poisoned = [i for i, place in enumerate(places) if world.is_poisoned(place)]
        if poisoned or spoils == "raises":
            at = poisoned[0] if poisoned else world.chance.randint(-1, batches - 1)
            line.tell(say.Failed(work.lease, at, "this batch is bad\x1b[2J", "Traceback"))
            return
        if line.life == world.lives:
            world.check_weights(work, line.shelf.weights)
        spiked = [i for i, place in enumerate(places) if world.is_spiked(place)]
        flat = toy_gradient(line.shelf.weights, places, world.spare, spoils != "not finite", spiked)
        lies = spoils == "lies"
        if spoils == "not finite":
            world.judge.wrong.add((self.number, work.lease))
        if self.lies and world.other_chance.random() < self.lies:
            world.judge.wrong.add((self.number, work.lease))
            flat.sums[0][0] += 1.0 + world.other_chance.random()
        norm = flat.norm()
        update = say.Update(
            lease=work.lease,
            losses=[loss_of(place) for place in places],
            touched=flat.touched.to_bytes(len(flat.trainable) // 8 + 1, "little"),
            compute_s=5e-324 if lies else seconds,
            codec_s=0.0,
            network_s=1e9 if lies else 0.0,
            rss_bytes=2**63 - 1 if lies else 1000,
            codec=work.reply_codec,
            received_nbytes=2**63 - 1 if lies else package.received_nbytes,
            received_s=5e-324 if lies else line.received_s,
            is_finite=math.isfinite(norm),
            norm=norm if math.isfinite(norm) else 0.0,
        )
        for _ in range(2 if not world.is_kind and world.chance.random() < 0.1 else 1):  # some say it twice
            line.send_update(update, flat, work.update_at)
        for room in world.ghosts:  # somebody who is gone writes where it once was to leave its update
            room.raw.fill_(255)
        if spoils == "not finite":
            flat.raw.zero_()  # a codec spreads it, to where no other machine would look
        world.spare.give(flat)

    def leave(self) -> None:
        """With what is done of its work, if that is something; in `sync` mostly in a form that can be used."""
        world = self.world
        self.is_leaving = True
        if self.line is None:
            return
        if self.work and self.paused_until <= world.now and not self.is_hung:
            package = self.work[0]
            size, seconds = len(package.work.sizes), world.now - self.began_at
            done = min(size, int(seconds * self.batches_per_s / self.slowness))
            if STRATEGIES[package.work.strategy].needs_whole_steps and world.chance.random() < 0.8:
                kept = Block(0, size)
                while kept.size > max(done, 1):
                    kept = halves(kept)[0]
                done = min(done, kept.size)
            if done:
                self.work.popleft()  # where it lies, it writes no more
                self.hand_in(package, done, seconds)
        if (line := self.line) is not None:
            line.tell(say.Leaving("it has to go\n\x1b[31m"))
            line.close()


class Line:
    """One connection of a node: from its hello to its end."""

    def __init__(self, node: Node) -> None:
        self.node, world = node, node.world
        self._world, self.life = world, world.lives
        self.shelf = Shelf(world.layout)
        self.payloads = Payloads(self.shelf, Encoders(threads=0))
        self.inbox: Inbox | None = None
        self.beside: Beside | None = None
        torn = self._torn((1 << 30, 1 << 30, 9000))
        self._mine, self._theirs = MemoryStream(torn), MemoryStream(torn)
        self._connection = Connection(self._mine, self._place_for_probe)
        self._connection.reader.allow(self._place_for_probe, HEADER_LIMIT, PAYLOAD_LIMIT)
        self._load = memoryview(b"")
        self.received_s = 0.01  # that its last work was on its way, as it tells
        self._heard_at = self._told_at = 0.0  # bytes on one line arrive in their order
        self._is_broken = False  # some were lost, so no others will arrive
        self._is_reacting = False
        self._mine.carry, self._theirs.carry = self._carry_up, self._carry_down
        self._mine.on_close, self._theirs.on_close = self._ended_here, self._ended_there
        self._mine.on_input = self._wake

    def _torn(self, sizes: tuple[int, ...]) -> int:
        """How many bytes arrive at once. Beside the coordinator all do: frames that say where its memory is have other
        lengths in every process, and a seed must play the same schedule in all of them.
        """
        size = self._world.chance.choice(sizes)
        return size if not self.node.is_beside else max(sizes)

    def begin(self) -> None:
        self._world.call(self._theirs, self.node.is_beside)
        self.tell(say.Knock(say.PROTOCOL, NONCE))

    def _introduce(self, challenge: say.Challenge) -> None:
        name, where = f"n{self.node.name}\x1b[31m", self.node.machine
        host = socket.gethostname() if self.node.is_beside else "elsewhere"
        who = Self("node", name, host, 1, "sim", self.node.key, where, 2)
        self.tell(hello(of_token(self._world.token), who, (NONCE, challenge.nonce)))

    def tell(self, message: say.Message, *payload: memoryview) -> None:
        try:
            self._connection.send(message, *payload)
            self._connection.drain()
        except ConnectionLost as error:
            self._over(str(error))

    def send_update(self, update: say.Update, flat: Flat, name: Name | None = None) -> None:
        try:
            room = self.beside.room(name) if name is not None and self.beside is not None else None
            self.payloads.send(self._connection, update, flat, room)
            self._connection.drain()
        except ConnectionLost as error:
            self._over(str(error))

    def close(self) -> None:
        self._mine.close()
        self._over("it hung up")

    def break_off(self) -> None:
        """As if a cable was cut: nothing arrives any more, and nobody is told."""
        self._is_broken = True

    # ── the way of bytes ─────────────────────────────────────────────────────────────────────────────────────────

    def _carry_up(self, data: bytes) -> None:
        if self._passes():
            self._heard_at = self._arrival(self._heard_at, self.node.up_s)
            self._world.at(self._heard_at, self._deliver, self._theirs, data)

    def _carry_down(self, data: bytes) -> None:
        if self._passes():
            self._told_at = self._arrival(self._told_at, self.node.down_s)
            self._world.at(self._told_at, self._deliver, self._mine, data)

    def _deliver(self, stream: MemoryStream, data: bytes) -> None:
        if not self._is_broken and not stream.is_closed:
            stream.arrive(data)

    def _arrival(self, before: float, usual_s: float) -> float:
        world = self._world
        return max(before, max(world.now, self.node.cut_until) + usual_s * world.chance.uniform(0.5, 2.0))

    def _passes(self) -> bool:
        """Does what is sent now arrive, sooner or later? Where something was lost, nothing else will."""
        node = self.node
        if node.cut_until > self._world.now and node.loses and not self._is_broken:
            self._is_broken = True
            patience_s = self._world.chance.uniform(0.1, 30.0)  # then it calls again
            self._world.at(node.cut_until + patience_s, self._give_up)
        self._world.faults += self._is_broken
        return not self._is_broken

    def _give_up(self) -> None:
        if self.node.line is self and not self.node.is_dead:
            self.close()

    def _ended_here(self) -> None:
        """Politely, when all was said; or with a reset, which may overtake what was said last."""
        world = self._world
        if not self._is_broken and world.chance.random() < 0.5:
            world.at(self._arrival(self._heard_at, self.node.up_s), self._theirs.hang_up)
        elif not self._is_broken:
            world.later(world.chance.uniform(0.0, self.node.up_s), self._reset)

    def _reset(self) -> None:
        self._is_broken = True
        self._theirs.hang_up()

    def _ended_there(self) -> None:
        if not self._is_broken:
            self._world.at(self._arrival(self._told_at, self.node.down_s), self._mine.hang_up)

    def _over(self, why: str) -> None:
        if self.node.line is self:
            self.node.lost(why)

    # ── the way of words ─────────────────────────────────────────────────────────────────────────────────────────

    def _wake(self) -> None:
        """Something has come: look at it as soon as this machine runs."""
        if not self._is_reacting:
            self._is_reacting = True
            self._world.at(max(self._world.now, self.node.paused_until), self._react)

    def _react(self) -> None:
        if self.node.is_dead or self.node.line is not self:
            return
        if self.node.paused_until > self._world.now:
            self._world.at(self.node.paused_until, self._react)
            return
        self._is_reacting = False
        try:
            while self._mine.has_input() and self.node.line is self:
                for message in self._connection.receive():
                    self._hear(message)
        except ConnectionLost as error:
            self._over(str(error))
        except Stopped as stopped:
            self._stopped(stopped.stop)

    def _hear(self, message: say.Message) -> None:
        if isinstance(message, say.Stop):
            raise Stopped(message)
        if isinstance(message, say.Challenge):
            self._introduce(message)
        elif isinstance(message, say.Welcome):
            self.node.number = message.node
            if message.memory is not None:
                self.beside = Beside(self._world.layout, message.memory)
        elif isinstance(message, say.Probe):
            if message.is_last:
                self._world.later(self._world.chance.expovariate(1 / BUILDING_S), self._ready)
            else:
                self.tell(message, self._load)
        elif self.inbox is not None:
            self.inbox.hear(message)
            while self.inbox.ready:
                self.node.take(self.inbox.ready.popleft())

    def _stopped(self, stop: say.Stop) -> None:
        self._world.note(f"{self.node!r} is told to stop: {stop.why!r}, {stop.exit_code}")
        self.close()

    def _ready(self) -> None:
        if self.node.line is not self or self.node.is_dead:
            return
        world = self._world
        self.inbox = Inbox(self._connection, self.shelf, self.payloads, self.beside)
        self._connection.reader.allow(self.inbox.place_for, HEADER_LIMIT, PAYLOAD_LIMIT)
        samples = world.scenario.schedule.samples if self.node.has_data else None
        begins_alike = world.chance.random() < 0.5
        if begins_alike:
            self.shelf.weights.raw.copy_(world.first_weights)
        weights = self.shelf.weights.fingerprint() if begins_alike else ""
        proof = self.beside.proof if self.beside is not None else ""
        self.tell(say.Ready(world.tensors, samples, weights=weights, memory=proof))
        self._mine.most_nbytes = self._theirs.most_nbytes = self._torn((1 << 30, 1 << 30, 90))
        self._beat()

    def _beat(self) -> None:
        node, world = self.node, self._world
        if node.line is not self or node.is_dead:
            return
        if max(node.paused_until, node.quiet_until) <= world.now:
            self.tell(say.Alive())
        world.later(world.chance.uniform(0.8, 2.0), self._beat)

    def _place_for_probe(self, message: say.Message, nbytes: int) -> Destinations:
        self._load = memoryview(bytearray(nbytes))
        return (self._load,) if nbytes else ()
