"""Job: what the user writes. Knows nothing of pools; importing it does not import torch."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable
from typing import Any

import msgspec

from wide.errors import UsageError

FUNCTIONS = ("model", "dataset", "loss", "optimizer")


class _Checked(type(msgspec.Struct)):  # type: ignore[misc]
    """Says which field was meant."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        known: tuple[str, ...] = cls.__struct_fields__
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise UsageError(f"Job({name}=…): there is no such field; {hint}")
        missing = [name for name in FUNCTIONS if name not in fields]
        if missing:
            raise UsageError(f"Job needs {', '.join(f'{name}=…' for name in missing)} too; see help(wide.Job)")
        return super().__call__(*values, **fields)


class Job(msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True):
    """What to train: one model, one data set, one loss, one optimizer, and how much of it makes an update.

    The result depends on these fields alone, never on how many machines work on it.

    model              () -> nn.Module. A function, so that every machine can build it.
    dataset            () -> map-style data set (__len__ and __getitem__), or one big tensor or array.
    loss               (model, batch) -> the mean loss of that batch, a scalar tensor; or wide.supervised(criterion).
    optimizer          (parameters) -> torch.optim.Optimizer.
    batch_size         Samples in one batch, the unit of work that a node is given.
    batches_per_step   Batches whose gradients make one update: a property of the job, never of the pool's size.
    epochs, steps      How long to train: passes over the data, or updates.
    seed               Everything random follows from it: weights, order of samples, augmentation, dropout.
    scheduler          (optimizer) -> learning-rate scheduler, stepped once for each update.
    evaluate           (model) -> {"accuracy": 0.97, …}, run beside training once an epoch, on a copy.
    collate            [samples] -> batch; default: torch's default_collate.
    clip_norm          Clip the merged gradient to this norm.
    threads            torch threads in every node: part of what makes results exact.
    workers            Processes for each node that fetch batches ahead, where the data set takes its time.
    """

    model: Callable[[], Any]
    dataset: Callable[[], Any]
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[list[Any]], Any]
    batch_size: int = 32
    batches_per_step: int = 16
    epochs: float | None = None
    steps: int | None = None
    seed: int = 0
    scheduler: Callable[[Any], Any] | None = None
    evaluate: Callable[[Any], dict[str, float]] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    clip_norm: float | None = None
    threads: int = 1
    workers: int = 0

    def __post_init__(self) -> None:
        self._check_functions()
        for name in ("batch_size", "batches_per_step", "threads"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise UsageError(f"Job({name}=…) must be a whole number of at least 1, got {getattr(self, name)!r}")
        if not isinstance(self.workers, int) or self.workers < 0:
            raise UsageError(f"Job(workers=…) must be a whole number of at least 0, got {self.workers!r}")
        for name in ("epochs", "steps", "clip_norm"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise UsageError(f"Job({name}=…) must be a number above 0, got {value!r}")
        if self.steps is not None and not isinstance(self.steps, int):
            raise UsageError(f"Job(steps=…) must be a whole number, got {self.steps!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**63:
            raise UsageError(f"Job(seed=…) must be a whole number from 0 to 2**63 - 1, got {self.seed!r}")

    def _check_functions(self) -> None:
        """Where something else is given, say what to write."""
        kind = type(self.model).__name__
        if _is_module(self.model):
            raise UsageError(
                f"Job(model=…) got a {kind} that is built already: give a function that builds it, "
                f"model=lambda: {kind}(…), so that every machine begins with the same weights"
            )
        if _is_module(self.loss) or getattr(self.loss, "__module__", "") == "torch.nn.functional":
            what = f"nn.{type(self.loss).__name__}()" if _is_module(self.loss) else f"F.{self.loss.__name__}"
            raise UsageError(
                f"Job(loss=…) is called with (model, batch), and {what} compares predictions with targets: "
                f"write loss=wide.supervised({what})"
            )
        for name in (*FUNCTIONS, "scheduler", "evaluate", "collate"):
            value = getattr(self, name)
            if not callable(value) and (name in FUNCTIONS or value is not None):
                or_none = "" if name in FUNCTIONS else " or None"
                kind = type(value).__name__
                hint = (
                    f": write {name}=lambda{' params' if name == 'optimizer' else ''}: …" if name in FUNCTIONS else ""
                )
                raise UsageError(f"Job({name}=…) must be a function{or_none}, got {kind}{hint}")


def _is_module(value: Any) -> bool:
    """If torch was not imported, it cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


class supervised:  # noqa: N801  (reads as a function: loss=wide.supervised(nn.CrossEntropyLoss()))
    """Makes a loss of (model, batch) from a criterion of (prediction, target), for batches of (input, target)."""

    def __init__(self, criterion: Callable[[Any, Any], Any]) -> None:
        self.criterion = criterion

    def __call__(self, model: Any, batch: Any) -> Any:
        inputs, target = batch
        return self.criterion(model(inputs), target)
