"""Which nodes share a machine, and whose turn it is there. Plain numbers; knows no network.

More processes than cores only take the cores, and each other's caches, away from one another. So no more of a machine's
nodes are given leases at a time than it has cores for; the others wait warm, and take turns slowly. Who is at a lease
when its turn ends finishes it. Should one die, another has its place at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TURN_S = 0.3  # at least: short against a run
STEPS = 8  # in a turn, at least: who comes amid a step may be told the core of somebody who is still at it


@dataclass(slots=True, eq=False)
class Machine:
    """Nodes that run on it, in the order in which they came, each with its place."""

    cores: int
    places: dict[int, int] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    members: int = 0  # those that are away included


class Machines:
    """A node that does not say where it runs has a machine of its own."""

    def __init__(self) -> None:
        self._by_name: dict[str, Machine] = {}
        self._of: dict[int, Machine] = {}
        self._turn_s = TURN_S

    def steps_take(self, seconds: float) -> None:
        """Turns are long against steps. They become shorter again only if steps do by far."""
        while self._turn_s < STEPS * seconds:
            self._turn_s *= 2
        while self._turn_s > TURN_S and self._turn_s > 4 * STEPS * seconds:
            self._turn_s /= 2

    def joined(self, node: int, name: str, cores: int) -> None:
        """If nodes disagree about their cores, the most is taken."""
        machine = self._by_name.setdefault(name, Machine(cores)) if name and cores else Machine(1)
        machine.cores = max(machine.cores, cores)
        machine.members += 1
        self._of[node] = machine
        self.back(node)

    def left(self, node: int) -> None:
        self.away(node)
        machine = self._of.pop(node)
        machine.members -= 1
        if not machine.members:
            self._by_name = {name: other for name, other in self._by_name.items() if other is not machine}

    def away(self, node: int) -> None:
        """It is silent, and holds up no turn."""
        machine = self._of[node]
        if node in machine.places:
            machine.nodes.remove(node)
            machine.places = {other: place for place, other in enumerate(machine.nodes)}

    def back(self, node: int) -> None:
        machine = self._of[node]
        if node not in machine.places:
            machine.places[node] = len(machine.nodes)
            machine.nodes.append(node)

    def has_turn(self, node: int, now: float) -> bool:
        machine = self._of[node]
        count = len(machine.nodes)
        if count <= machine.cores or node not in machine.places:
            return True
        return (machine.places[node] - int(now / self._turn_s) * machine.cores) % count < machine.cores

    def core_of(self, node: int, now: float) -> int:
        """Where it should compute, if every core of its machine has a node; -1: wherever it likes."""
        machine = self._of[node]
        count = len(machine.nodes)
        if count < machine.cores or machine.cores < 2 or node not in machine.places:
            return -1
        core = (machine.places[node] - int(now / self._turn_s) * machine.cores) % count
        return core if core < machine.cores else -1

    def in_place_of(self, node: int, now: float) -> list[int]:
        """Whose turn it is on this node's machine."""
        machine = self._of[node]
        nodes, first = machine.nodes, int(now / self._turn_s) * machine.cores
        return [nodes[(first + i) % len(nodes)] for i in range(min(machine.cores, len(nodes)))]
