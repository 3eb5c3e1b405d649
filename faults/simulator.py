"""The whole coordinator in a simulated world, on virtual time, all from one seed: its real loop, messages, frames,
intake, delivery, ledger and checkpoints. Only network, disk, clock and the nodes' computing are the world's.

While the coordinator waits for something to happen, the world goes on (`pass_time`); it may crash between any two of
its actions. What goes wrong comes from mischief.py; whether the coordinator was right is said by invariants.py.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from typing import Any

from faults.disk import Disk, MemoryDb, MemoryWriter
from faults.evaluator import Evaluator
from faults.invariants import Judge, Violation, check_buffers, check_ledger
from faults.mischief import Mischief
from faults.node import Node
from faults.scenario import MOST_NODES, STRATEGIES, Scenario, draw
from faults.toy import SEED, toy_job, toy_master, trained_plainly
from wide.codec.digest import KEY_NBYTES, Digest
from wide.codec.encoders import Encoders
from wide.codec.layout import Flat
from wide.codec.spare import Spare
from wide.codec.speeds import PRIORS
from wide.coordinator import assembly, resume
from wide.coordinator.aside import Pending
from wide.coordinator.assembly import Course
from wide.coordinator.events import (
    Action,
    ChangeStrategy,
    EndRun,
    Event,
    GrantLease,
    MakeVersion,
    StrategyChosen,
    Ticked,
)
from wide.coordinator.resume import Start
from wide.coordinator.server import Server
from wide.errors import TrainingFailed
from wide.exchange.common import Common
from wide.exchange.door import Door
from wide.exchange.feed import Feed
from wide.exchange.guests import Guests
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.node.trainer import Place
from wide.strategy.catalogue import STRATEGIES as CATALOGUE
from wide.telemetry.clock import Clock
from wide.transport.memory import MemoryHub, MemoryStream
from wide.wire import messages as say

MOST_LULL_S = 0.9  # to save time, the coordinator sleeps longer where nothing happens; a second would be "away"
PATIENCE_S = 2000.0  # once the world is kind, a run has to end; the time that slow nodes need comes on top
MOST_EVENTS = 3_000_000
BEGIN_S = 1000.0  # of the clock: it never shows 0


class Crashed(BaseException):
    """The coordinator's process is gone, in the middle of what it was doing."""


class World:
    """One schedule. `run` it; a Violation is raised where something is wrong."""

    def __init__(
        self,
        seed: int,
        most_nodes: int = MOST_NODES,
        log: list[str] | None = None,
        of_its_kind: Callable[[Scenario], Scenario] = lambda drawn: drawn,
    ) -> None:
        self.chance = random.Random(seed)
        self.other_chance = random.Random(-1 - seed)  # for what came later: it must not change what seeds mean
        self.scenario = scenario = of_its_kind(draw(self.chance, most_nodes))
        self.judge = Judge(seed, scenario.schedule, scenario.steps, scenario.seconds, scenario.is_open)
        self.job = toy_job(scenario.schedule.samples, scenario.is_plain)
        self.log = log
        self.now, self.wall_ahead_s = BEGIN_S, 0.0
        self.nodes: list[Node] = []
        self.shares_memory = seed % 3 == 0  # with half of its nodes
        self.ghosts: deque[Flat] = deque(maxlen=30)  # rooms for updates that lost nodes have in their hands
        self.disk = Disk()
        self.token, self.evaluator_token = "pool", "evaluator"
        self.faults = self.events = self.most_nodes = self.lives = 0
        self.is_over = self.is_kind = self.is_stopping = self.is_up = False
        self.fuse = 0  # the coordinator crashes after so many actions; 0: it does not
        self.serial = self._calls = 0
        self.server: Server | None = None
        self._hub: MemoryHub | None = None
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._lull_s, self._deadline = 0.0, math.inf
        self._weights: dict[int, bytes] = {}  # of each version, when the first lease with it was granted
        self._happening: tuple[Event, Any] = (Ticked(), None)
        self._decided: list[Action] = []
        master = toy_master(self.job)
        self.layout, self.tensors = master.layout, master.layout.describe()
        self.first_weights, self.spare = master.weights.raw, Spare(master.layout)
        self._samples = Samples(self.job, SEED)
        self._mischief = Mischief(self)

    def run(self) -> World:
        for _ in range(self.scenario.nodes):
            self.later(self.chance.expovariate(1.0), self.join)
        self._mischief.wait()
        strategy = self.scenario.strategy
        while not self.is_over:
            self._live(strategy)
            if self.scenario.may_change:
                strategy = self.chance.choice(STRATEGIES)
        return self

    def be_kind(self) -> None:
        """No more faults. Who sleeps or hangs does so for ever; but somebody else is there."""
        self.is_kind = True
        self.note("no more faults")
        for node in self.nodes:
            node.slowness, node.spoils, node.lies = 1.0, "", 0.0
        for _ in range(self.chance.randint(1, 3)):
            self.later(self.chance.expovariate(1.0), self.join)
        batches, seconds = self.scenario.schedule.position(self.scenario.steps or 1), self.scenario.seconds or 0.0
        self._deadline = self.now + PATIENCE_S + seconds + 5 * batches / self.scenario.batches_per_s

    def note(self, words: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.now - BEGIN_S:10.3f}  {words}")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        """What nobody may go by."""
        return self.now + self.wall_ahead_s

    def later(self, delay_s: float, do: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + delay_s, do, *arguments)

    def at(self, time_s: float, do: Callable[..., object], *arguments: Any) -> None:
        heapq.heappush(self._heap, (time_s, next(self._order), do, arguments))

    def pass_time(self, seconds: float, has_news: Callable[[], bool]) -> float:
        """While the coordinator waits. How long that was."""
        began = self.now
        self._lull_s = min(1.5 * max(self._lull_s, seconds), MOST_LULL_S) if seconds else 0.0
        until = self.now + (self._lull_s if seconds else 0.0)
        while self._heap and self._heap[0][0] <= until:
            self._step()
            if has_news():
                self._lull_s = 0.0
                return self.now - began
        self.now = max(self.now, until)
        if self.now > self._deadline or self.events > MOST_EVENTS:
            self.judge.refuse(f"the run does not end: {self.events} events, {self.now:.0f} s")
        return self.now - began

    def _step(self) -> None:
        time_s, _, do, arguments = heapq.heappop(self._heap)
        self.now = max(self.now, time_s)
        self.events += 1
        do(*arguments)

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────

    def _live(self, strategy: str) -> None:
        """One coordinator's life, from where the one before it had got to; and the time until the next one begins."""
        self.lives += 1
        db = MemoryDb(self.disk)
        writer = MemoryWriter(self.disk, db)
        server = self._coordinator(strategy, db, writer)
        try:
            server.serve(lambda: "")
            server.close()
            self._ended(server, db, writer)
        except Crashed:
            self.note("the coordinator crashes")
            if self.chance.random() < 0.7:
                writer.settle()
            db.crash(self.chance)
            self._forget(server)
        except TrainingFailed as error:
            self.judge.refuse(f"training failed: {error}")
        finally:
            self.fuse, self.is_stopping, self.server, self.is_up = 0, False, None, False
        if not self.is_over:
            until = self.now + self.chance.uniform(0.0, 5.0)
            while self._heap and self._heap[0][0] <= until:
                self._step()
            self.now = max(self.now, until)

    def _coordinator(self, strategy: str, db: MemoryDb, writer: MemoryWriter) -> Server:
        scenario = self.scenario
        schedule = Schedule(scenario.schedule.samples, 1, scenario.schedule.batches_per_step, seed=SEED)
        common = Common(smallest=0)
        master, start = toy_master(self.job, common.allocate), Start(is_resumed=self.lives > 1)
        options = scenario.options(strategy)
        if (saved := self.disk.newest()) is not None:
            options = resume.remembered(options, saved.state["asked"], "here")
            start = resume.restore(saved, schedule, master, "here")
        steps = resume.length(scenario.steps, start.position, schedule, "here")
        clock = Clock(self.monotonic_s, self.wall_s)
        digest = Digest(bytes(KEY_NBYTES))  # the same key in every life: a seed plays the same schedule again
        chance = self.other_chance.random
        course = Course(options, schedule, master, steps, db, writer, start, clock, digest=digest, chance=chance)
        self._hub = MemoryHub(self.pass_time)
        door = Door(Guests(self.token, self.evaluator_token), SEED, "auto", scenario.compress, "sim")
        server = assembly.server(
            course,
            self._hub,
            door,
            Feed(self._samples, schedule),
            Encoders(threads=0),
            scenario.is_open,
            scenario.evaluates,
            try_codecs=lambda names, *_: {name: PRIORS[name] for name in names},
            common=common,
        )
        self.note(f"a coordinator begins as {server.pool.strategy.name}, at {start.position}")
        self.judge.begin(start.position)
        self._weights = {}
        self._watch(server)
        self.server, self.is_up = server, True
        if scenario.evaluates:
            Evaluator(self).begin()
        return server

    def _watch(self, server: Server) -> None:
        """Let the judge see every event and every action of it, and let it crash after any of them."""
        handle, performers = server.pool.handle, server._queue._performers

        def handled(event: Event, now: float) -> list[Action]:
            self.judge.see_done(self._decided)
            self._happening, is_over = (event, self.judge.hear(event)), server.pool.is_over
            try:
                self._decided = handle(event, now)
            except Exception as error:
                self.note(f"{event} -> {error!r}")
                raise Violation(self.judge.seed, f"{event}: {error!r}") from error
            if self.log is not None and (self._decided or not isinstance(event, Ticked)):
                self.note(f"{event} -> {self._decided}")
            if not is_over:
                self.judge.see_answer(event, self._decided)
            return self._decided

        def watched(perform: Callable[[Any], Pending | None]) -> Callable[[Any], Pending | None]:
            def performed(action: Action) -> Pending | None:
                self.judge.see(*self._happening, action, self.now)
                if isinstance(action, GrantLease) and action.version == self.judge.version:
                    self._remember(action.version, server)
                pending = perform(action)
                if isinstance(action, MakeVersion):
                    if not server.run.master.weights.is_finite():
                        self.judge.refuse("a version is not finite, though every update said that it was")
                    if server.pool.strategy.needs_whole_steps:
                        self._remember(action.version + 1, server)  # some have work for it already
                if isinstance(action, ChangeStrategy):
                    self._weights.clear()  # from the strategy before, nodes may have been ahead of them
                if self.fuse and not isinstance(action, EndRun):
                    self.fuse -= 1
                    if not self.fuse:
                        raise Crashed
                return pending

            return performed

        server.pool.handle = handled  # type: ignore[method-assign]
        server._queue._performers = {kind: watched(perform) for kind, perform in performers.items()}

    def _ended(self, server: Server, db: MemoryDb, writer: MemoryWriter) -> None:
        """It ended by itself: with the run, or because somebody asked it to."""
        writer.settle()
        db.settle()
        check_buffers(self.judge, server)
        self._check_rejects()
        end = server.run.ended
        if end is None or self.is_stopping:
            return
        self.is_over = True
        check_ledger(self.judge, self.disk, CATALOGUE)
        if self.scenario.is_exact and not end.failure and self.scenario.steps is not None and not self.judge.is_tainted:
            expected = trained_plainly(self.job, server.run.schedule, self.scenario.steps, self.scenario.spike)
            if self._bytes(server) != expected:
                self.judge.refuse("the weights are not those of one machine")

    def _check_rejects(self) -> None:
        if bad := self.disk.read("SELECT detail FROM rejects WHERE reason='served badly'"):
            self.judge.refuse(f"somebody's message was served badly: {bad[0][0]}")
        ugly = [text for (text,) in self.disk.read("SELECT name FROM nodes UNION SELECT detail FROM rejects")]
        if any(not text.isprintable() for text in ugly):
            self.judge.refuse("a peer's words were written down as they came")

    def _forget(self, server: Server) -> None:
        """A process that crashed: its end of every line is closed by its system."""
        assert self._hub is not None
        self._hub.stop_listening()
        for peer in server.exchange._board.everybody:
            peer.connection.close()

    def _remember(self, version: int, server: Server) -> None:
        """What the weights are in this version."""
        if version not in self._weights:
            self._weights = {**dict(list(self._weights.items())[-8:]), version: self._bytes(server)}

    def _bytes(self, server: Server) -> bytes:
        master = server.run.master
        return bytes(master.weights.bytes[: master.layout.live_nbytes])

    # ── what nodes and mischief ask for ──────────────────────────────────────────────────────────────────────────

    def call(self, stream: MemoryStream, is_beside: bool = False) -> None:
        assert self._hub is not None
        self._calls += 1
        elsewhere = f"203.0.{self._calls // 256 % 256}.{self._calls % 256}:1"
        self._hub.call(stream, "127.0.0.1:1" if is_beside else elsewhere)

    def check_weights(self, work: say.Work, weights: Flat) -> None:
        """Has a node just the weights that it was granted its lease with? Where they are exact, that can be told."""
        lease = next((held for held in self._leases() if held.number == work.lease), None)
        if lease is None or work.strategy != "sync" or self.scenario.compress == "int8":
            return
        if self.server is not None and lease.block not in self.server.pool.leases.out:
            return  # somebody else has done it, and the weights may have moved on
        version = self.judge.granted_version.get(work.lease)
        expected = self._weights.get(version) if version is not None else None
        if expected is not None and bytes(weights.bytes[: self.layout.live_nbytes]) != expected:
            self.judge.refuse(f"lease {work.lease} is computed with other weights than those of version {version}")

    def is_poisoned(self, place: Place) -> bool:
        return self.scenario.schedule.position(place.step) + place.batch == self.scenario.poison

    def is_spiked(self, place: Place) -> bool:
        return self.scenario.schedule.position(place.step) + place.batch in self.scenario.spike

    def join(self) -> None:
        self.serial += 1
        speed = self.scenario.batches_per_s * 4 ** self.chance.uniform(-1, 1)
        up_s, down_s = 10 ** self.chance.uniform(-3, 0), 10 ** self.chance.uniform(-3, 0)
        self.nodes = [node for node in self.nodes if not node.is_dead]
        self.nodes.append(Node(self, self.serial, speed, up_s, down_s))
        self.nodes[-1].dial()
        self.most_nodes = max(self.most_nodes, len(self.nodes))

    def choose(self, strategy: str) -> None:
        """As a planner would."""
        if self.server is not None:
            self.server._queue.post(StrategyChosen(strategy))

    def _leases(self) -> list[Any]:
        by_node = self.server.pool.leases.by_node if self.server is not None else {}
        return [lease for held in by_node.values() for lease in held.values()]
