"""What goes wrong in a simulated world: one function for each fault, done to one node or to all. Knows the world's
nodes and its clock; knows nothing of how the coordinator takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.scenario import STRATEGIES
from wide.coordinator.events import (
    LinkMeasured,
    NodeLeft,
    NodeSilent,
    RunFailed,
    StopRequested,
    StrategyChosen,
    UpdateArrived,
)
from wide.strategy.tree import halves

if TYPE_CHECKING:
    from benchmarks.simulator import Node, World

DAY_S = 86400.0
FOREVER_S = 1e9
SWARM = (0.1, 0.5, 1.0, 3.0, 10.0)  # each schedule has its favourites: what is rare in one is all there is in another


class Mischief:
    """Faults at random, until there were enough of them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._faults = [fault for fault in FAULTS if fault is not change or world.scenario.may_change]
        self._weights = [FAULTS[fault] * world.chance.choice(SWARM) for fault in self._faults]

    def wait(self) -> None:
        self._world.later(self._world.chance.expovariate(1.0) * self._world.scenario.fault_every_s, self._strike)

    def _strike(self) -> None:
        world = self._world
        if world.faults >= world.scenario.faults:
            world.be_kind()
            return
        fault = world.chance.choices(self._faults, self._weights)[0]
        alive = [node for node in world.nodes.values() if not node.is_dead]
        if alive:
            node = world.chance.choice(alive)
            world.note(f"fault: {fault.__name__}, node {node.number}")
            world.faults += 1
            fault(world, node)
        self.wait()


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill(world: World, node: Node) -> None:
    node.is_dead = True
    world.later(world.chance.uniform(0.0, 5.0), world.lose, node)
    world.expect_silence(node)


def everybody_leaves(world: World, _: Node) -> None:
    for node in list(world.nodes.values()):
        world.faults += 1
        kill(world, node)


def come(world: World, _: Node) -> None:
    world.join()


def pause(world: World, node: Node) -> None:
    _pause(world, node, 10 ** world.chance.uniform(-1, 2))


def sleep(world: World, node: Node) -> None:
    """Its connection lives, but it will never say anything again."""
    _pause(world, node, FOREVER_S)


def _pause(world: World, node: Node, seconds: float) -> None:
    node.paused_until = max(node.paused_until, world.now + seconds)
    world.expect_silence(node)
    world.at(node.paused_until, world.wake, node)


def hang(world: World, node: Node) -> None:
    """Its heart beats, but it will never be done."""
    node.is_hung = True


def slow(world: World, node: Node) -> None:
    node.slowness = 10.0 if node.slowness == 1.0 else 1.0


def spoil(world: World, node: Node) -> None:
    node.spoils = world.chance.choice(("raises", "not finite"))


def leave(world: World, node: Node) -> None:
    """With what is done of its work, if that is something; in `sync` mostly in a form that can be used."""
    if node.work and node.paused_until <= world.now and not node.is_hung:
        grant, seconds = node.work[0], world.now - node.began_at
        done = min(grant.block.size, int(seconds * node.batches_per_s / node.slowness))
        if grant.group == 0 and world.chance.random() < 0.8:
            kept = grant.block
            while kept.size > max(done, 1):
                kept = halves(kept)[0]
            done = min(done, kept.size)
        if done:
            problem = node.spoils if node.spoils != "raises" else ""
            world.say(node, UpdateArrived(node.number, grant.lease, problem, seconds, done))
    world.say(node, NodeLeft(node.number, "leaving"))
    node.is_dead = True
    world.expect_silence(node)


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cut(world: World, node: Node) -> None:
    _cut(world, node, 10 ** world.chance.uniform(-1, 2))


def cut_half(world: World, _: Node) -> None:
    seconds = 10 ** world.chance.uniform(-1, 2)
    for node in world.chance.sample(list(world.nodes.values()), (len(world.nodes) + 1) // 2):
        world.faults += 1
        _cut(world, node, seconds)


def _cut(world: World, node: Node, seconds: float) -> None:
    node.cut_until = max(node.cut_until, world.now + seconds)
    node.loses = world.chance.random() < 0.5
    world.expect_silence(node)
    world.at(node.cut_until, world.wake, node)


def miss_heartbeats(world: World, node: Node) -> None:
    """Nothing is wrong with it, only nothing was heard."""
    if not node.is_silent:
        node.is_silent = True
        world.feed(NodeSilent(node.number))
        world.later(world.chance.expovariate(1.0), world.wake, node)


def measure(world: World, node: Node) -> None:
    world.feed(LinkMeasured(node.number, 10 ** world.chance.uniform(-3, 1)))


# ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────


def crash(world: World, _: Node) -> None:
    world.fuse = world.chance.randint(1, 10)


def stop(world: World, _: Node) -> None:
    """Somebody stops the run, or it breaks; and somebody goes on with it."""
    world.is_stopping, world.fuse = True, 0
    world.feed(StopRequested("asked to") if world.chance.random() < 0.7 else RunFailed("the loss is 40, it was 2"))
    world.restart(world.saved[-1])


def change(world: World, _: Node) -> None:
    world.feed(StrategyChosen(world.chance.choice(STRATEGIES)))


def jump_clock(world: World, _: Node) -> None:
    world.wall_ahead_s += world.chance.choice((-DAY_S, DAY_S))


FAULTS: dict[Callable[[World, Node], None], float] = {  # how often, relative to each other
    kill: 20,
    everybody_leaves: 1,
    come: 3,
    pause: 15,
    sleep: 1,
    hang: 1,
    slow: 10,
    spoil: 8,
    leave: 15,
    cut: 12,
    cut_half: 1,
    miss_heartbeats: 8,
    measure: 5,
    crash: 2,
    stop: 1,
    change: 6,
    jump_clock: 3,
}
