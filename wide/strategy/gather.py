"""A version's updates on their way to becoming one: what folds hand them to. Knows updates only as something that can
be added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol

from wide.strategy.fold import Model, U


class Part(NamedTuple):
    """An update's part in its version: whose, how much it weighs, of how many own steps it is (0: it is a gradient)."""

    node: int
    weight: float
    steps: int = 0


class Gather(Protocol[U]):
    """An update is `weight` times something of which a mean is wanted: `take` gives that mean, times all weights. What
    `fit` says yes to is from then on as it will be added; of others that is not known before the end.
    """

    @property
    def held(self) -> list[U]: ...  # what is in its hands
    def fit(self, update: U, part: Part) -> bool: ...
    def add(self, update: U, part: Part) -> None: ...  # after `fit`
    def take(self) -> U: ...
    def void(self) -> None: ...  # nothing was added


Gathering = Callable[[Model[Any]], Gather[Any]]


class Sum(Generic[U]):
    """All that is added, as it is."""

    def __init__(self, model: Model[U]) -> None:
        self._model = model
        self._total: U | None = None

    @property
    def held(self) -> list[U]:
        return [] if self._total is None else [self._total]

    def fit(self, update: U, part: Part) -> bool:
        return True

    def add(self, update: U, part: Part) -> None:
        self._total = update if self._total is None else self._model.join(self._total, update)

    def take(self) -> U:
        assert self._total is not None
        total, self._total = self._total, None
        return total

    def void(self) -> None:
        for update in self.held:
            self._model.release(update)
        self._total = None
