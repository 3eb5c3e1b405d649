"""What goes wrong in a simulated world: one function for each fault, done to one node or to all. Knows the world's
nodes and its clock; knows nothing of how the coordinator takes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from faults.scenario import STRATEGIES
from wide.transport.memory import MemoryStream
from wide.wire import messages as say
from wide.wire.frames import encode

if TYPE_CHECKING:
    from faults.node import Node
    from faults.simulator import World

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
        alive = [node for node in world.nodes if not node.is_dead and not node.is_leaving]
        if alive:
            node = world.chance.choice(alive)
            world.note(f"fault: {fault.__name__}, {node!r}")
            world.faults += 1
            fault(world, node)
        self.wait()


# ── nodes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def kill(world: World, node: Node) -> None:
    """Its system closes its connection, sooner or later; sometimes nobody is left to do so. Another machine comes."""
    node.is_dead = True
    line = node.line
    if line is not None and world.chance.random() < 0.8:
        world.later(world.chance.uniform(0.0, 5.0), line.close)
    elif line is not None:
        line.break_off()
    world.later(world.chance.expovariate(0.3), world.join)


def everybody_leaves(world: World, _: Node) -> None:
    for node in list(world.nodes):
        if not node.is_dead:
            world.faults += 1
            kill(world, node)


def all_reset_at_once(world: World, _: Node) -> None:
    """A switch fails: every connection breaks in the same moment."""
    for node in list(world.nodes):
        world.faults += 1
        node.hang_up()


def come(world: World, _: Node) -> None:
    world.join()


def pause(world: World, node: Node) -> None:
    node.paused_until = max(node.paused_until, world.now + 10 ** world.chance.uniform(-1, 2))


def sleep(world: World, node: Node) -> None:
    """Its connection lives, but it will never say anything again."""
    node.paused_until = world.now + FOREVER_S
    world.later(world.chance.expovariate(0.3), world.join)


def hang(world: World, node: Node) -> None:
    """Its heart beats, but it will never be done."""
    node.is_hung = True


def slow(world: World, node: Node) -> None:
    node.slowness = 10.0 if node.slowness == 1.0 else 1.0


def spoil(world: World, node: Node) -> None:
    node.spoils = world.chance.choice(("raises", "not finite", "lies"))


def leave(world: World, node: Node) -> None:
    node.leave()
    world.later(world.chance.expovariate(0.3), world.join)


# ── links ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cut(world: World, node: Node) -> None:
    _cut(world, node, 10 ** world.chance.uniform(-1, 2))


def cut_half(world: World, _: Node) -> None:
    seconds = 10 ** world.chance.uniform(-1, 2)
    for node in world.chance.sample(world.nodes, (len(world.nodes) + 1) // 2):
        world.faults += 1
        _cut(world, node, seconds)


def _cut(world: World, node: Node, seconds: float) -> None:
    node.cut_until = max(node.cut_until, world.now + seconds)
    node.loses = world.chance.random() < 0.5


def miss_heartbeats(world: World, node: Node) -> None:
    """Nothing is wrong with it, only nothing was heard."""
    node.quiet_until = world.now + world.chance.uniform(3.0, 10.0)


def reset(world: World, node: Node) -> None:
    node.hang_up()


def stranger(world: World, _: Node) -> None:
    """Somebody without a token, or without any idea."""
    if not world.is_up:
        return
    noise = (
        world.chance.randbytes(60),
        b"GET / HTTP/1.1\r\n\r\n",
        encode(say.Knock(say.PROTOCOL, bytes(16))),
        encode(say.Knock(say.PROTOCOL, bytes(16)))
        + encode(say.Hello("token", b"guess", "node", "x\x1b[2J", "y", 1, "z")),
        encode(say.Hello("invite 00000000", bytes(32), "king", "x", "y", 1, "z")),
        encode(say.Update(1, [0.5], b"\x01", 0.0, 0.0, 0.0, 0)),
        encode(say.Knock(0, bytes(16))) + encode(say.Update(1, [0.5], b"", 0.0, 0.0, 0.0, 0)),
        b"",
    )
    stream = MemoryStream()
    stream.arrive(world.chance.choice(noise))
    if world.chance.random() < 0.5:
        stream.hang_up()
    world.call(stream)


# ── the coordinator ──────────────────────────────────────────────────────────────────────────────────────────────


def crash(world: World, _: Node) -> None:
    world.fuse = world.chance.randint(1, 10)


def stop(world: World, _: Node) -> None:
    """Somebody stops the run, or it breaks; and somebody goes on with it."""
    if world.server is None or world.server.run.ended is not None:
        return
    world.is_stopping, world.fuse = True, 0
    if world.chance.random() < 0.7:
        world.server.run.stop_reason = "asked to"
    else:
        world.server.run.record.divergence.problem = "the loss is 40, it was 2"


def change(world: World, _: Node) -> None:
    world.choose(world.chance.choice(STRATEGIES))


def jump_clock(world: World, _: Node) -> None:
    world.wall_ahead_s += world.chance.choice((-DAY_S, DAY_S))


FAULTS: dict[Callable[[World, Node], None], float] = {  # how often, relative to each other
    kill: 20,
    everybody_leaves: 1,
    all_reset_at_once: 1,
    come: 3,
    pause: 15,
    sleep: 1,
    hang: 3,
    slow: 10,
    spoil: 8,
    leave: 15,
    cut: 12,
    cut_half: 1,
    miss_heartbeats: 8,
    reset: 8,
    stranger: 4,
    crash: 2,
    stop: 1,
    change: 6,
    jump_clock: 3,
}
