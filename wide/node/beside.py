"""A node beside its coordinator, on one machine: weights and updates lie in memory that both see. Knows layouts and
where things lie; knows no messages.
"""

from __future__ import annotations

import torch

from wide.codec.layout import Flat, Layout
from wide.codec.memory import Name
from wide.transport.shared import MOST_MAPPED, Neighbour


class Beside:
    """`proof` shows the coordinator that this process sees its memory; empty, if it does not."""

    def __init__(self, layout: Layout, greeting: tuple[int, int, int] | None) -> None:
        self._layout, self.proof = layout, ""
        if greeting is not None:
            self._neighbour = Neighbour(greeting[0])
            self.proof = self._neighbour.proof(greeting[1:])
        self._rooms: dict[Name, Flat] = {}

    def weights(self, name: Name, only_live: bool) -> torch.Tensor:
        """A version, as (nbytes,) uint8: all of it, or all that changes."""
        return self._neighbour.tensor(name, self._layout.live_nbytes if only_live else self._layout.nbytes)

    def room(self, name: Name) -> Flat:
        """Where an update is wanted."""
        if name not in self._rooms:
            if len(self._rooms) >= MOST_MAPPED:
                self._rooms.clear()
            self._rooms[name] = Flat(self._layout, only_live=True, memory=Elsewhere(self.weights(name, only_live=True)))
        return self._rooms[name]


class Elsewhere:
    """Memory of another process."""

    name: Name | None = None

    def __init__(self, raw: torch.Tensor) -> None:
        self.raw, self.bytes = raw, raw.numpy().data

    def close(self) -> None:
        """It is not ours."""
