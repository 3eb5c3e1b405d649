"""What a node computes whose loop is the user's: batches are handed to it, or it is left alone between two steps of its
own. Never sees the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wide.codec.layout import Flat
from wide.errors import Left
from wide.job.definition import OwnLoop
from wide.job.here import Here, added, here, weighted
from wide.job.seeding import mix
from wide.node.local import Drift
from wide.node.trainer import Place, Trainer
from wide.node.turns import Turns

OVER = "its loop is over"


class Handed(NamedTuple):
    """What a loop is given: where the run is, and the batch, if it is one of the pool's."""

    here: Here
    batch: Any = None
    seed: int = 0  # of the batch, from which all random numbers follow


class Stepped(NamedTuple):
    """A loop has made a step of its own: the loss that it logged, and whatever else."""

    loss: float
    logged: dict[str, float]


class LoopLoss:
    """The job's loss, on a node whose loop is the user's: whatever that makes of the batch."""

    def __init__(self, own_loop: OwnLoop) -> None:
        self.own_loop, self.turns = own_loop, Turns()
        self.seed = 0  # the run's

    def __call__(self, model: Any, batch: Any) -> Any:
        place = here()
        return self.turns.ask(Handed(place, batch, mix(self.seed, place.step, place.batch)))


class LoopSteps(Drift):
    """Steps that the user's loop makes, with its own optimizers and its own data."""

    def __init__(self, trainer: Trainer, turns: Turns) -> None:
        super().__init__(trainer)
        self._turns, self._is_over = turns, False

    def rebase(self) -> None:
        self._trainer.take_as_it_is()
        super().rebase()

    def use_rates(self, rates: Sequence[float]) -> None:
        """Its optimizers are its own."""

    def train(
        self,
        places: Sequence[Place],
        batch_at: Callable[[int], Any],
        group: int,
        goes_on: Callable[[int, int], bool],
    ) -> list[float]:
        """As many steps as there are places; fewer, if the loop ends: then what it has done is handed in."""
        losses: list[float] = []
        while len(losses) < len(places):
            if self._is_over:
                raise Left(OVER)
            said = self._turns.ask(Handed(self._trainer.here(places[len(losses)])))
            if said is None:
                self._is_over = True
                if not losses:
                    continue
                break
            losses.append(said.loss)
            self._logged = added(self._logged, weighted(said.logged, 1.0))
            if not goes_on(len(losses), len(places)):
                break
        self._touched = self._trainer.all_touched
        return losses

    def delta(self) -> Flat:
        self._trainer.take_as_it_is()
        return super().delta()
