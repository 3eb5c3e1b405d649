"""Job: what the user writes. Knows nothing of pools; importing it does not import torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from wide.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

    Loss = Callable[[nn.Module, Any], torch.Tensor]


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One model, one data set, one loss, one optimizer, and how much of it makes an update.

    The result depends on these fields alone, never on how many machines work on it.
    """

    model: Callable[[], nn.Module]
    dataset: Callable[[], Any]  # () -> map-style data set
    loss: Loss  # (model, batch) -> mean loss of that batch, a scalar tensor
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int = 32
    batches_per_step: int = 16
    epochs: float | None = None
    steps: int | None = None
    seed: int = 0
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    evaluate: Callable[[nn.Module], dict[str, float]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    clip_norm: float | None = None
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("model", "dataset", "loss", "optimizer"):
            if not callable(getattr(self, name)):
                raise UsageError(f"Job({name}=…) must be a function, got {type(getattr(self, name)).__name__}")
        for name in ("scheduler", "evaluate", "collate"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise UsageError(f"Job({name}=…) must be a function or None, got {type(getattr(self, name)).__name__}")
        for name in ("batch_size", "batches_per_step", "threads"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UsageError(f"Job({name}=…) must be a whole number of at least 1, got {getattr(self, name)!r}")
        for name in ("epochs", "steps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise UsageError(f"Job({name}=…) must be a number above 0, got {value!r}")
        if self.steps is not None and not isinstance(self.steps, int):
            raise UsageError(f"Job(steps=…) must be a whole number, got {self.steps!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError(f"Job(seed=…) must be a whole number from 0 to 2**63 - 1, got {self.seed!r}")


class supervised:  # noqa: N801  (reads as a function: loss=wide.supervised(nn.CrossEntropyLoss()))
    """Makes a loss of (model, batch) from a criterion of (prediction, target), for batches of (input, target)."""

    def __init__(self, criterion: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        self.criterion = criterion

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        inputs, target = batch
        return self.criterion(model(inputs), target)
