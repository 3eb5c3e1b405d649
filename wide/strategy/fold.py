"""How updates become a version: what every strategy's fold answers, and what it may do to the model. Knows updates only
as something that can be added and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch

from wide.job.descent import Descent
from wide.strategy.policy import Made
from wide.strategy.tree import Block


class Update(Protocol):
    """A sum of gradients, or what a node's own steps changed."""

    trainable: list[torch.Tensor]
    trainable_runs: list[torch.Tensor]  # the same numbers, flat
    averaged_runs: list[torch.Tensor]  # of buffers
    weights: list[float]  # of batches whose losses are totals


U = TypeVar("U", bound=Update)


class Model(Protocol[U]):
    """The one true copy of the weights, and its optimizer."""

    descent: Descent

    @property
    def trainable(self) -> Sequence[torch.Tensor]: ...
    def join(self, left: U, right: U) -> U: ...  # left + right, in the memory of one of them
    def scale(self, update: U, factor: float) -> None: ...
    def with_debts(self, total: U) -> U: ...
    def by_counts(self, total: U, batches: int) -> None: ...  # the mean of so many totals
    def descend(self, total: U, steps: int) -> None: ...  # one step of the job's optimizer, the `steps`-th
    def follow(self, total: U, steps: int) -> None: ...  # others have made that step
    def move_buffers(self, total: U) -> None: ...
    def release(self, update: U) -> None: ...


class Merge(Protocol):
    """An update that counts, `discount` times; since its node was given weights, these have made `staleness` steps.
    `group` of its batches are one step of the node's own (0: their gradient is wanted).
    """

    @property
    def node(self) -> int: ...
    @property
    def block(self) -> Block: ...
    @property
    def discount(self) -> float: ...
    @property
    def staleness(self) -> int: ...
    @property
    def group(self) -> int: ...


U_in = TypeVar("U_in", bound=Update, contravariant=True)


class Fold(Protocol[U_in]):
    """`merge` takes an update over; `make` makes the version of what was merged, the one after which `steps` steps'
    worth of batches are in the weights.
    """

    def merge(self, merge: Merge, update: U_in) -> None: ...
    def make(self, made: Made, steps: int) -> None: ...
    def void(self) -> None: ...  # what was merged for the next version does not count
    def bring_back(self) -> None: ...  # the weights become what whole versions have made of them
    def state(self) -> Any: ...  # what it remembers from one version to the next
