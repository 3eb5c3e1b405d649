"""What a node computes whose loop is the user's: batches are handed to it, or it is left alone between two steps of its
own. Never sees the network.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from wide.codec.layout import Flat
from wide.codec.sums import Untouched
from wide.errors import Left, TrainingFailed
from wide.job.definition import OwnLoop
from wide.job.here import Here, added, here, weighted
from wide.node.local import Drift
from wide.node.trainer import Place, Trainer
from wide.node.turns import Turns

OVER = "its loop is over"


class Handed(NamedTuple):
    """What a loop is given: where the run is, and the batch, if it is one of the pool's."""

    here: Here
    batch: Any = None
    begin: Callable[[], None] = lambda: None  # call it before the batch is computed: who knows what was done meanwhile


class Stepped(NamedTuple):
    """A loop has made a step of its own: the loss that it logged, and whatever else."""

    loss: float | None
    logged: dict[str, float]


class LoopLoss:
    """The job's loss, on a node whose loop is the user's: whatever that makes of the batch."""

    def __init__(self, own_loop: OwnLoop) -> None:
        self.own_loop, self.turns = own_loop, Turns()
        self.trainer: Trainer  # of the node's workbench, once there is one

    def __call__(self, model: Any, batch: Any) -> Any:
        place = here()
        seed = self.trainer.seed_of(place.step, place.batch)
        return self.turns.ask(Handed(place, batch, functools.partial(self.trainer.begin_batch, seed)))


class LoopSteps(Drift):
    """Steps that the user's loop makes, with its own optimizers and its own data."""

    def __init__(self, trainer: Trainer, turns: Turns) -> None:
        super().__init__(trainer)
        self._turns, self._is_over = turns, False
        self._usual = 0.0  # the loss that was logged last
        self._objects = _objects(trainer)
        self._resting = Untouched(trainer.bound.raw, [*trainer.layout.frozen, *trainer.layout.constant])

    def begin(self) -> None:
        super().begin()
        self._resting.forget()
        self._resting.begin()

    def rebase(self) -> None:
        self._check()
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
        losses: list[float | None] = []
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
        return self._filled(losses)

    def _filled(self, losses: list[float | None]) -> list[float]:
        """Steps that logged no loss have that of the others."""
        logged = [loss for loss in losses if loss is not None]
        self._usual = sum(logged) / len(logged) if logged else self._usual
        return [self._usual if loss is None else loss for loss in losses]

    def delta(self) -> Flat:
        self._check()
        self._trainer.take_as_it_is()
        return super().delta()

    def _check(self) -> None:
        """What the pool has agreed on must still be there: nobody else would see another parameter, or one move."""
        for name, now in (objects := _objects(self._trainer)).items():
            if self._objects.get(name) != now:
                raise TrainingFailed(
                    f"{name} was made, replaced, frozen or unfrozen within wide.local, which no other node sees: do "
                    "that before"
                )
        if missing := self._objects.keys() - objects.keys():
            raise TrainingFailed(f"{min(missing)} was taken away within wide.local: do that before")
        if names := self._resting.changed():
            raise TrainingFailed(
                f"{names[0]} is frozen, and changed within wide.local, which no other node sees: leave it out of the "
                "models, or train it"
            )


def _objects(trainer: Trainer) -> dict[str, tuple[int, bool]]:
    return {name: (id(parameter), parameter.requires_grad) for name, parameter in trainer.model.named_parameters()}
