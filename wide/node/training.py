"""What a node computes for a lease: one class for each strategy. No sockets, no clock.

`train` computes a lease's batches and returns their losses; `result` is what is handed in for them, in host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from wide.codec.layout import Flat
from wide.errors import Left
from wide.job.definition import Job
from wide.node.fused import Fused
from wide.node.local import OwnSteps
from wide.node.own_loop import LoopSteps
from wide.node.trainer import Place, Trainer
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.local import LOCAL

Fetch = Callable[[int], Any]  # the lease's i-th batch; raises Enough where there should be no more
GoesOn = Callable[[int, int], bool]  # so many of so many batches are done: is there to be another one?


class Training(Protocol):
    """`fetches_all`: whoever fetches batches decides when it is enough; otherwise `goes_on` does, step by step."""

    fetches_all: bool

    def begin(self) -> None: ...  # with the pool's weights, after another strategy
    def new_weights(self) -> None: ...  # have arrived
    def train(
        self, places: Sequence[Place], batch_at: Fetch, group: int, goes_on: GoesOn, into: Flat | None = None
    ) -> list[float]: ...
    def result(self) -> Flat: ...  # in `into`, if that is no trouble
    def use_rates(self, rates: Sequence[float]) -> None: ...  # of the optimizers' groups, as the pool has them


class Exact:
    """`sync`: gradients summed in the order of the tree, batch by batch."""

    fetches_all = True

    def __init__(self, job: Job, trainer: Trainer, fused: Fused) -> None:
        self._trainer = trainer
        self._total: Flat | None = None

    def begin(self) -> None:
        """With the pool's weights: steps of its own may have moved the model."""
        self._trainer.weights_changed()

    def new_weights(self) -> None:
        self._trainer.weights_changed()

    def train(
        self, places: Sequence[Place], batch_at: Fetch, group: int, goes_on: GoesOn, into: Flat | None = None
    ) -> list[float]:
        self._total, losses = self._trainer.sum(places, batch_at, into if self._trainer.is_on_cpu else None)
        return losses

    def result(self) -> Flat:
        assert self._total is not None
        total, self._total = self._total, None
        return self._trainer.to_host(total)

    def use_rates(self, rates: Sequence[float]) -> None:
        """The optimizer is the pool's."""


class Several(Exact):
    """`async`: the same sum up to rounding, several batches in one pass where that is quicker."""

    def __init__(self, job: Job, trainer: Trainer, fused: Fused) -> None:
        super().__init__(job, trainer, fused)
        self._fused = fused

    def train(
        self, places: Sequence[Place], batch_at: Fetch, group: int, goes_on: GoesOn, into: Flat | None = None
    ) -> list[float]:
        self._total, losses = self._fused.sum(places, batch_at)
        return losses


class Own:
    """`local`: steps of the node's own optimizer, or of the user's own loop; what they changed is handed in."""

    fetches_all = False

    def __init__(self, trainer: Trainer, steps: OwnSteps | LoopSteps) -> None:
        self._trainer, self._steps = trainer, steps

    def begin(self) -> None:
        self._trainer.weights_changed()
        self._steps.begin()

    def new_weights(self) -> None:
        self._steps.rebase()

    def train(
        self, places: Sequence[Place], batch_at: Fetch, group: int, goes_on: GoesOn, into: Flat | None = None
    ) -> list[float]:
        return self._steps.train(places, batch_at, group, goes_on)

    def result(self) -> Flat:
        return self._steps.delta()

    def use_rates(self, rates: Sequence[float]) -> None:
        self._steps.use_rates(rates)


class Unfit(Exact):
    """A strategy for which a loop of the user's own is no use."""

    def begin(self) -> None:
        """There is nothing that it could begin."""

    def train(
        self, places: Sequence[Place], batch_at: Fetch, group: int, goes_on: GoesOn, into: Flat | None = None
    ) -> list[float]:
        own = self._trainer.job.own_loop
        if own is not None and own.every:
            raise Left("this loop makes steps of its own, and the pool wants gradients: serve its own script")
        raise Left(
            "this loop computes gradients of the pool's batches, and the pool wants steps of a node's own: serve it "
            "with --strategy sync or async"
        )


def training_of(strategy: str, job: Job, trainer: Trainer, fused: Fused) -> Training:
    """A loop of the user's own makes steps, or gradients batch by batch; each wants one kind of pool."""
    own = job.own_loop
    if own is None:
        return TRAININGS[strategy](job, trainer, fused)
    if (strategy == LOCAL.name) != (own.every > 0):
        return Unfit(job, trainer, fused)
    if own.every:
        return Own(trainer, LoopSteps(trainer, job.loss.turns))  # type: ignore[attr-defined]
    return Exact(job, trainer, fused)


def _own_steps(job: Job, trainer: Trainer, fused: Fused) -> Training:
    return Own(trainer, OwnSteps(job, trainer, fused, trainer.seed))


TRAININGS: dict[str, Callable[[Job, Trainer, Fused], Training]] = {
    "sync": Exact,
    "async": Several,
    "local": _own_steps,
}
assert TRAININGS.keys() == STRATEGIES.keys()
