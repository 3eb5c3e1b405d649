"""A star on virtual time: the real coordinator, as many simulated nodes as wanted, and one link that all their bytes
share. Nothing goes wrong here; only time is measured.

The model is a toy of 4 KB, and every payload of that size counts as so many bytes as a real one would have. The link is
full duplex, and shared as TCP shares it: all transfers of one direction get the same part of it. A node's own link is
as wide as the coordinator's, and so never in the way.
"""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils.data import TensorDataset

import wide
from faults.disk import MemoryDb, MemoryWriter
from faults.node import Line, Node
from faults.scenario import NEVER_S, Scenario
from faults.simulator import World
from faults.toy import SEED, toy_master
from wide.codec.layout import Flat
from wide.codec.spare import Spare
from wide.coordinator.events import MakeVersion, MergeUpdate
from wide.coordinator.server import Server
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.transport.memory import MemoryStream
from wide.wire import messages as say

PIECES = 4  # of a payload that arrive one after the other, so that the coordinator sees it moving
JOIN_PER_S = 150.0  # the coordinator's gate lets 200 a second pass
DELAY_S = 0.001
SAMPLES = 1 << 20
LEAST = 2  # versions that are measured, at least
T = TypeVar("T")


class Calm(random.Random):
    """The middle of every range, and the first of every choice."""

    def uniform(self, a: float, b: float) -> float:
        return (a + b) / 2

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[0]


class Cable:
    """One direction of the coordinator's link: whoever sends gets the same part of it."""

    def __init__(self, world: World, bytes_per_s: float) -> None:
        self._world, self._bytes_per_s = world, bytes_per_s
        self._served, self._at, self._turn = 0.0, world.now, 0  # bytes that each transfer was given since the beginning
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self.carried = 0.0

    def send(self, nbytes: float, arrived: Callable[[], None]) -> None:
        self._catch_up()
        self._order += 1
        self.carried += nbytes
        heapq.heappush(self._waiting, (self._served + nbytes, self._order, arrived))
        self._plan()

    def _catch_up(self) -> None:
        now = self._world.now
        if self._waiting:
            self._served += (now - self._at) * self._bytes_per_s / len(self._waiting)
        self._at = now

    def _plan(self) -> None:
        """Whoever is first: all others are later, whatever comes in between."""
        self._turn += 1
        if self._waiting:
            left_s = max(0.0, self._waiting[0][0] - self._served) * len(self._waiting) / self._bytes_per_s
            self._world.later(left_s, self._deliver, self._turn)

    def _deliver(self, turn: int) -> None:
        if turn != self._turn:
            return
        self._catch_up()
        due, _, arrived = heapq.heappop(self._waiting)
        self._served = max(self._served, due)
        last = [arrived]
        while self._waiting and self._waiting[0][0] <= self._served * (1 + 1e-12):
            last.append(heapq.heappop(self._waiting)[2])
        self._plan()
        for call in last:
            call()


class Piece(NamedTuple):
    """Some bytes, and how many they stand for; of a payload's last: since when it is on its way."""

    data: bytes
    nbytes: float
    since: float | None = None


class StarLine(Line):
    """A line whose bytes go through the coordinator's link, in their order."""

    def __init__(self, node: StarNode) -> None:
        super().__init__(node)
        self._star = node.star
        self._going: dict[MemoryStream, deque[Piece]] = {self._mine: deque(), self._theirs: deque()}
        self._under_way: set[MemoryStream] = set()

    def _beat(self) -> None:
        """As seldom as may be: most of what happens in a large star would be this."""
        if self.node.line is self:
            self.tell(say.Alive())
            self._world.later(2.5 * say.BEAT_S, self._beat)

    def _carry_up(self, data: bytes) -> None:
        self._carry(self._star.up, self._theirs, data)

    def _carry_down(self, data: bytes) -> None:
        self._carry(self._star.down, self._mine, data)

    def _carry(self, cable: Cable, to: MemoryStream, data: bytes) -> None:
        star = self._star
        if self.inbox is None or len(data) < star.layout.live_nbytes:
            self._going[to].append(Piece(data, float(len(data))))
        else:  # there is a payload in it
            size, extra = -(-len(data) // PIECES), star.payload_nbytes - star.layout.live_nbytes
            cuts = [data[at : at + size] for at in range(0, len(data), size)]
            self._going[to].extend(Piece(cut, len(cut) + extra / len(cuts)) for cut in cuts)
            self._going[to].append(self._going[to].pop()._replace(since=self._world.now))
        self._move(cable, to)

    def _move(self, cable: Cable, to: MemoryStream) -> None:
        if to in self._under_way or not self._going[to]:
            return
        self._under_way.add(to)
        data, nbytes, since = self._going[to].popleft()

        def arrived() -> None:
            self._under_way.discard(to)
            if since is not None and to is self._mine:
                self.received_s = self._world.now - since
            self._world.later(DELAY_S, self._deliver, to, data)
            self._move(cable, to)

        cable.send(nbytes, arrived)


class StarNode(Node):
    """It has the data, a machine of its own, and never tires."""

    def __init__(self, star: Star, name: int) -> None:
        super().__init__(star, name, star.scenario.batches_per_s, 0.0, 0.0)
        self.star, self.has_data, self.machine = star, True, ""

    def dial(self) -> None:
        if self.line is None and not self.world.is_over:
            self.line = StarLine(self)
            self.line.begin()


class Star(World):
    """`nodes` nodes that compute a batch in `batch_s`; a step has a batch for each. What is sent for a version, or an
    update, is `payload_nbytes`. What happens for `window_s` is measured, beginning half of that after all
    have come; and two versions at least.
    """

    def __init__(
        self, strategy: str, nodes: int, payload_nbytes: float, link_bytes_per_s: float, batch_s: float, window_s: float
    ) -> None:
        super().__init__(seed=1, most_nodes=2)
        self.chance, self.is_kind, self.payload_nbytes, self._window_s = Calm(1), True, payload_nbytes, window_s
        self.scenario = Scenario(
            strategy=strategy,
            compress="none",
            is_plain=True,
            may_change=False,
            is_open=True,
            evaluates=False,
            schedule=Schedule(SAMPLES, 1, nodes, seed=SEED),
            steps=None,
            seconds=None,
            save_every_s=NEVER_S,
            nodes=nodes,
            batches_per_s=1 / batch_s,
            faults=0,
            fault_every_s=NEVER_S,
            audit=0.0,
            lies=0.0,
            spike=range(0),
            poison=-1,
        )
        self.job = _job()
        master = toy_master(self.job)
        self.layout, self.tensors = master.layout, master.layout.describe()
        self.first_weights, self.spare = master.weights.raw, Spare(master.layout)
        self._samples = Samples(self.job, SEED)
        self.up, self.down = Cable(self, link_bytes_per_s), Cable(self, link_bytes_per_s)
        self._all_here_at = 0.0
        self._made: list[tuple[float, int]] = []  # versions, since all are here: when, and the batches until then

    def run(self) -> Star:
        for number in range(self.scenario.nodes):
            self.later(number / JOIN_PER_S, self.join)
        self._live(self.scenario.strategy)
        return self

    @property
    def versions_per_s(self) -> float:
        return (len(self._made) - 1) / (self._made[-1][0] - self._made[0][0])

    @property
    def utilisation(self) -> float:
        """The part of what its nodes could compute that they did."""
        (began, first), (ended, last) = self._made[0], self._made[-1]
        return (last - first) / (ended - began) / (self.scenario.nodes * self.scenario.batches_per_s)

    def join(self) -> None:
        self.serial += 1
        self.nodes.append(StarNode(self, self.serial))
        self.nodes[-1].dial()

    def _watch(self, server: Server) -> None:
        """Only versions are counted; whether all is right is for the simulator proper."""
        performers = server._queue._performers
        merge, make = performers[MergeUpdate], performers[MakeVersion]
        merged = 0

        def counted(action: MergeUpdate) -> Any:
            nonlocal merged
            merged += action.block.size
            return merge(action)

        def made(action: MakeVersion) -> Any:
            if len(server.pool.members) == self.scenario.nodes:
                self._all_here_at = self._all_here_at or self.now
                if self.now - self._all_here_at >= self._window_s / 2:
                    self._made.append((self.now, merged))
                if len(self._made) > LEAST and self.now - self._made[0][0] >= self._window_s:
                    server.run.stop_reason = "enough was seen"
            return make(action)

        server._queue._performers = {**performers, MergeUpdate: counted, MakeVersion: made}

    def _ended(self, server: Server, db: MemoryDb, writer: MemoryWriter) -> None:
        self.is_over = True

    def check_weights(self, work: say.Work, weights: Flat) -> None:
        """Not here."""


def _job() -> wide.Job:
    return wide.Job(
        model=lambda: nn.Linear(32, 32, bias=False),
        dataset=lambda: TensorDataset(torch.zeros(SAMPLES, 0)),
        loss=lambda model, batch: next(model.parameters()).sum(),  # nobody asks for it
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        batch_size=1,
        seed=SEED,
    )
