"""The real coordinator's state machine among simulated nodes and links, on virtual time, all from one seed.

Plays the shell (server.py): carries actions out one by one, and may crash between any two. What goes wrong comes from
mischief.py; whether the coordinator was right is said by invariants.py after every event.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.invariants import Judge, Violation
from benchmarks.mischief import Mischief
from benchmarks.scenario import MOST_NODES, STRATEGIES, draw
from wide.coordinator.events import (
    Action,
    DropNode,
    EndRun,
    Event,
    GrantLease,
    LinkMeasured,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeSilent,
    Position,
    SaveCheckpoint,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.strategy.tree import Block

TICK_S, MOST_TICK_S = 0.05, 1.0  # the shell's; and, to save time, when nothing comes of it
SILENT_S = 3.0  # several heartbeats
LOST_S = 60.0  # a connection on which nothing arrives has ended
REPEATED = 0.15  # of all updates are heard twice
PATIENCE_S = 2000.0  # once the world is kind, a run has to end; the time that slow nodes need comes on top
MOST_EVENTS = 500_000


class Crashed(Exception):
    """The coordinator's process is gone, in the middle of what it was doing."""


@dataclass(slots=True)
class Node:
    """One connection, and the machine at its other end: who comes back is another node."""

    number: int
    batches_per_s: float
    up_s: float
    down_s: float
    work: deque[GrantLease] = field(default_factory=deque)
    began_at: float = 0.0
    is_dead: bool = False
    is_broken: bool = False  # a message was lost, so no other will arrive
    is_silent: bool = False  # as far as the coordinator knows
    is_hung: bool = False
    paused_until: float = 0.0
    cut_until: float = 0.0
    loses: bool = False  # what is sent while it is cut off; else it arrives afterwards
    slowness: float = 1.0
    spoils: str = ""  # what is wrong with its next result
    heard_at: float = 0.0  # messages on one connection
    told_at: float = 0.0  # arrive in their order

    def is_away(self, now: float) -> bool:
        return self.is_dead or self.is_broken or self.paused_until > now or self.cut_until > now


class World:
    """One schedule. `run` it; a Violation is raised where something is wrong."""

    def __init__(self, seed: int, most_nodes: int = MOST_NODES, log: list[str] | None = None) -> None:
        self.chance = random.Random(seed)
        self.scenario = scenario = draw(self.chance, most_nodes)
        self.judge = Judge(seed, scenario.schedule, scenario.steps, scenario.seconds, scenario.is_open)
        self.pool = scenario.pool(scenario.strategy, None)
        self.log = log
        self.now = self.wall_ahead_s = 0.0
        self.nodes: dict[int, Node] = {}  # whom the coordinator knows
        self.saved = [Position()]
        self.faults = self.events = self.most_nodes = 0
        self.is_over = self.is_kind = self.is_stopping = False
        self.fuse = 0  # the coordinator crashes after so many actions; 0: it does not
        self._names = self._serial = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._tick_s, self._deadline = TICK_S, math.inf
        self._left_meanwhile: set[int] = set()  # while actions were carried out that may concern them
        self._mischief = Mischief(self)

    def run(self) -> World:
        for _ in range(self.scenario.nodes):
            self.later(self.chance.expovariate(1.0), self.join)
        self.later(TICK_S, self._tick)
        self._mischief.wait()
        while not self.is_over:
            self.now, _, do, arguments = heapq.heappop(self._heap)
            do(*arguments)
            if self.now > self._deadline or self.events > MOST_EVENTS:
                self.judge.refuse(f"the run does not end: {self.events} events, {self.now:.0f} s")
        return self

    def be_kind(self) -> None:
        """No more faults. Who sleeps or hangs does so for ever; but somebody else is there."""
        self.is_kind = True
        self.note("no more faults")
        for node in self.nodes.values():
            node.slowness, node.spoils = 1.0, ""
        for _ in range(self.chance.randint(1, 3)):
            self.later(self.chance.expovariate(1.0), self.join)
        batches, seconds = self.scenario.schedule.position(self.scenario.steps or 1), self.scenario.seconds or 0.0
        self._deadline = self.now + PATIENCE_S + seconds + 5 * batches / self.scenario.batches_per_s

    def note(self, words: str) -> None:
        if self.log is not None:
            self.log.append(f"{self.now:10.3f}  {words}")

    # ── time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def monotonic_s(self) -> float:
        return self.now

    def wall_s(self) -> float:
        """What nobody may go by."""
        return self.now + self.wall_ahead_s

    def later(self, delay_s: float, do: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + delay_s, do, *arguments)

    def at(self, time_s: float, do: Callable[..., object], *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (time_s, self._serial, do, arguments))

    def _tick(self) -> None:
        self._tick_s = TICK_S if self.feed(Ticked()) else min(1.5 * self._tick_s, MOST_TICK_S)
        self.later(self._tick_s, self._tick)

    # ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────

    def feed(self, event: Event) -> bool:
        """Tell the coordinator, and do what it says. Was there anything to do?"""
        try:
            return self._lose(event) if isinstance(event, NodeLeft) else self._decide(event)
        except Crashed:
            self.note("the coordinator crashes")
            self.restart(self.chance.choice(self.saved[-2:]))  # the last one may not have been written yet
            return True
        finally:
            self._left_meanwhile.clear()

    def restart(self, start: Position) -> None:
        """A new coordinator goes on from there, and all nodes have to come back to it."""
        if self.is_over:
            return
        self.saved = self.saved[: self.saved.index(start) + 1]
        self.fuse, self.is_stopping = 0, False
        self.judge.begin(start)
        strategy = self.chance.choice(STRATEGIES) if self.scenario.may_change else self.scenario.strategy
        self.note(f"a coordinator begins as {strategy}, with {start}")
        self.pool = self.scenario.pool(strategy, start)
        down_s = self.chance.uniform(0.0, 5.0)
        for node in self.nodes.values():
            node.is_dead = True
            self.later(down_s + self.chance.expovariate(1.0), self.join)
        self.nodes.clear()

    def _decide(self, event: Event) -> bool:
        if self.is_over:
            return False
        self.events += 1
        block = self.judge.hear(event)
        try:
            actions = self.pool.handle(event, self.monotonic_s())
        except Exception as error:
            self.note(f"{event} -> {error!r}")
            raise Violation(self.judge.seed, f"{event}: {error!r}") from error
        if self.log is not None and (actions or not isinstance(event, Ticked)):
            self.note(f"{event} -> {actions}")
        self.judge.see_answer(event, actions)
        for action in actions:
            self._do(event, block, action)
        self.judge.see_done(actions)
        return bool(actions)

    def _do(self, event: Event, block: Block | None, action: Action) -> None:
        if isinstance(action, GrantLease) and (action.node in self._left_meanwhile or self.is_over):
            return
        self.judge.see(event, block, action, self.now)
        if isinstance(action, GrantLease):
            self._send(self.nodes[action.node], action)
        elif isinstance(action, DropNode):
            self._lose(NodeLeft(action.node, action.why))
        elif isinstance(action, SaveCheckpoint):
            self.saved.append(action.position)
        elif isinstance(action, EndRun):
            self.is_over = not self.is_stopping
        if self.fuse and not self.is_over:
            self.fuse -= 1
            if not self.fuse:
                raise Crashed

    def _send(self, node: Node, grant: GrantLease) -> None:
        if node.is_dead and self.chance.random() < 0.5:
            self._lose(NodeLeft(node.number, "nobody is there"))  # in the middle of other actions, as in the shell
        elif not node.is_dead and self._passes(node):
            node.told_at = max(node.told_at, max(self.now, node.cut_until) + self._delay_s(node.down_s))
            self.at(node.told_at, self._receive, node, grant)

    def _lose(self, left: NodeLeft) -> bool:
        """A connection has ended. Whoever was at its other end comes back, sooner or later."""
        node = self.nodes.pop(left.node, None)
        if node is None:
            return False
        node.is_dead = True
        self._left_meanwhile.add(node.number)
        self.later(self.chance.expovariate(0.3), self.join)
        return self._decide(left)

    # ── links ────────────────────────────────────────────────────────────────────────────────────────────────────

    def say(self, node: Node, event: Event) -> None:
        """To the coordinator, which may hear it twice."""
        if not self._passes(node):
            return
        node.heard_at = max(node.heard_at, max(self.now, node.cut_until) + self._delay_s(node.up_s))
        self.at(node.heard_at, self._heard, node, event)
        if not self.is_kind and isinstance(event, UpdateArrived) and self.chance.random() < REPEATED:
            self.faults += 1
            self.at(node.heard_at + self.chance.choice((0.0, 1.0, 30.0)), self._heard, node, event)

    def expect_silence(self, node: Node) -> None:
        self.later(SILENT_S, self._miss, node)
        if node.is_dead:
            self.later(LOST_S, self.lose, node)

    def wake(self, node: Node) -> None:
        if node.number in self.nodes and node.is_silent and not node.is_away(self.now):
            node.is_silent = False
            self.feed(NodeHeard(node.number))

    def lose(self, node: Node) -> None:
        self.feed(NodeLeft(node.number, "gone"))

    def _miss(self, node: Node) -> None:
        """Its heart did not beat for a while."""
        if node.number in self.nodes and not node.is_silent and node.is_away(self.now):
            node.is_silent = True
            self.feed(NodeSilent(node.number))

    def _passes(self, node: Node) -> bool:
        """Does what is sent now arrive, sooner or later? Where something was lost, nothing else will."""
        if node.cut_until > self.now and node.loses and not node.is_broken:
            node.is_broken = True
            self.later(SILENT_S, self._miss, node)
            self.later(LOST_S, self.lose, node)
            self.at(node.cut_until + self.chance.uniform(0.1, LOST_S / 2), self.lose, node)  # when it calls again
        self.faults += node.is_broken
        return not node.is_broken

    def _heard(self, node: Node, event: Event) -> None:
        if node.is_silent and self.chance.random() < 0.5:
            self.wake(node)
        self.feed(event)

    def _delay_s(self, usual_s: float) -> float:
        return usual_s * self.chance.uniform(0.5, 2.0)

    # ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────

    def join(self) -> None:
        self._names += 1
        speed = self.scenario.batches_per_s * 4 ** self.chance.uniform(-1, 1)
        up_s, down_s = 10 ** self.chance.uniform(-3, 0), 10 ** self.chance.uniform(-3, 0)
        node = self.nodes[self._names] = Node(self._names, speed, up_s, down_s)
        self.most_nodes = max(self.most_nodes, len(self.nodes))
        self.feed(NodeJoined(node.number))
        if node.number in self.nodes and self.chance.random() < 0.8:
            self.feed(LinkMeasured(node.number, up_s + down_s))

    def _receive(self, node: Node, grant: GrantLease) -> None:
        node.work.append(grant)
        if len(node.work) == 1:
            self._compute(node)

    def _compute(self, node: Node) -> None:
        node.began_at = max(self.now, node.paused_until)
        seconds = node.work[0].block.size / node.batches_per_s * node.slowness * self.chance.uniform(0.8, 1.2)
        self.at(node.began_at + seconds, self._computed, node, node.work[0], seconds)

    def _computed(self, node: Node, grant: GrantLease, seconds: float) -> None:
        if node.is_dead or node.is_hung:
            return
        if node.paused_until > self.now:
            self.at(node.paused_until, self._computed, node, grant, seconds)
            return
        node.work.popleft()
        self.say(node, self._result(node, grant, seconds))
        if node.work:
            self._compute(node)

    def _result(self, node: Node, grant: GrantLease, seconds: float) -> Event:
        spoils, node.spoils = node.spoils, ""
        if grant.block.first <= self.scenario.poison < grant.block.end:
            return WorkFailed(node.number, grant.lease, self.scenario.poison - grant.block.first, "this batch is bad")
        if spoils == "raises":
            return WorkFailed(node.number, grant.lease, self.chance.randint(-1, grant.block.size - 1), "out of memory")
        size = grant.block.size if self.chance.random() < 0.8 else None
        return UpdateArrived(node.number, grant.lease, spoils, seconds, size)
