"""Which nodes share a machine, and whose turn it is there. Plain numbers; knows no network.

More processes than cores only take the cores, and each other's caches, away from one another. So a machine works at no
more leases than it has cores for; nodes beyond that wait warm, and take turns slowly. Should one die, another has its
place at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TURN_S = 0.3  # long against a lease, short against a run


@dataclass(slots=True)
class Machine:
    """Nodes that run on it, in the order in which they came."""

    cores: int
    nodes: list[int] = field(default_factory=list)


class Machines:
    """A node that does not say where it runs has a machine of its own."""

    def __init__(self) -> None:
        self._by_name: dict[str, Machine] = {}
        self._of: dict[int, Machine] = {}

    def joined(self, node: int, name: str, cores: int) -> None:
        """If nodes disagree about their cores, the most is taken."""
        machine = self._by_name.setdefault(name, Machine(cores)) if name and cores else Machine(1)
        machine.cores = max(machine.cores, cores)
        self._of[node] = machine
        self.back(node)

    def left(self, node: int) -> None:
        self.away(node)
        machine = self._of.pop(node, None)
        if machine is not None and all(other is not machine for other in self._of.values()):
            self._by_name = {name: other for name, other in self._by_name.items() if other is not machine}

    def away(self, node: int) -> None:
        """It is silent, and holds up no turn."""
        machine = self._of.get(node)
        if machine is not None and node in machine.nodes:
            machine.nodes.remove(node)

    def back(self, node: int) -> None:
        machine = self._of[node]
        if node not in machine.nodes:
            machine.nodes.append(node)

    def has_turn(self, node: int, now: float) -> bool:
        machine = self._of[node]
        nodes, cores = machine.nodes, machine.cores
        if len(nodes) <= cores or node not in nodes:
            return True
        return (nodes.index(node) - int(now / TURN_S) * cores) % len(nodes) < cores
