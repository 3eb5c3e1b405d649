"""Job: what the user writes. Knows nothing of pools; importing it does not import torch."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from wide.errors import UsageError

FUNCTIONS = ("model", "dataset", "loss", "optimizer")
DEFAULT_BATCH_SIZE = 32
OPTIONAL = ("scheduler", "evaluate", "collate", "after_step", "order", "stop_when", "finish")


class OwnLoop(NamedTuple):
    """A job's loss may have one of these as `own_loop`: then a script computes, in a loop of its own. Between two
    meetings with the pool it makes `every` steps of its own optimizer; 0: batches and updates are the pool's.
    """

    every: int = 0


class _Checked(type(msgspec.Struct)):  # type: ignore[misc]
    """Says which field was meant."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        known: tuple[str, ...] = cls.__struct_fields__
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
                raise UsageError(f"Job({name}=…): there is no such field; {hint}")
        needed = FUNCTIONS[:2] if fields.get("phases") else FUNCTIONS
        missing = [name for name in needed if name not in fields]
        if missing:
            raise UsageError(f"Job needs {', '.join(f'{name}=…' for name in missing)} too; see help(wide.Job)")
        return super().__call__(*values, **fields)


class Phase(msgspec.Struct, frozen=True):
    """A loss and what it trains: step i of a job with n phases is phase i mod n. `Phase(loss, optimizer)`."""

    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]


class per_epoch(msgspec.Struct, frozen=True):  # noqa: N801  (reads as a function: scheduler=wide.per_epoch(StepLR…))
    """A scheduler that is stepped once an epoch, not once an update."""

    build: Callable[[Any], Any]


class on_metric(msgspec.Struct, frozen=True):  # noqa: N801
    """A scheduler that is stepped with a metric whenever there is one, as ReduceLROnPlateau: what evaluate() says, what
    the loss has logged, or "loss", which is that of training unless evaluate() has one.
    """

    metric: str
    build: Callable[[Any], Any]


class Job(msgspec.Struct, metaclass=_Checked, frozen=True, kw_only=True):
    """What to train: one model, one data set, one loss, one optimizer, and how much of it makes an update.

    The result depends on these fields alone, never on how many machines work on it.

    model              () -> nn.Module. A function, so that every machine can build it.
    dataset            () -> map-style data set (__len__ and __getitem__), or one big tensor or array; an
                       IterableDataset, which the coordinator reads; or a DataLoader of one of these.
    loss               (model, batch) -> the mean loss of that batch, a scalar tensor; or wide.supervised(criterion).
                       Also wide.total(sum, count), for tokens; and (loss, {"acc": 0.9}), which is logged.
    optimizer          (parameters) -> torch.optim.Optimizer, or a list of them; given the model, if its parameter is
                       called so.
    phases             Instead of loss and optimizer: [wide.Phase(loss, optimizer), …], which take turns, step by step.
    batch_size         Samples in one batch, the unit of work that a node is given.
    batches_per_step   Batches whose gradients make one update: a property of the job, never of the pool's size. Left
                       out, batch_size is what one update sees, cut into 8 batches.
    epochs, steps      How long to train: passes over the data, or updates.
    seed               Everything random follows from it: weights, order of samples, augmentation, dropout.
    scheduler          (optimizer) -> learning-rate scheduler, stepped once for each update; wide.per_epoch(f);
                       wide.on_metric("loss", f).
    evaluate           (model) -> {"accuracy": 0.97, …}, run beside training once an epoch, on a copy.
    evaluate_every     Steps; otherwise once an epoch.
    best               "accuracy", or "-loss": the checkpoint with the best value is kept as `best`.
    stop_when          (list of evaluations so far) -> bool: early stopping.
    collate            [samples] -> batch; default: torch's default_collate.
    order              wide.order.shuffled(), sequential(), weighted(w), by_length(lengths), blocks(k), or
                       (epoch, generator) -> ids or lists of ids.
    drop_last          Leave out an epoch's last batch if it is smaller.
    clip_norm          Clip the merged gradient to this norm.
    after_step         (model, where) -> None, once for each update, on the one true model.
    init               A state dict, or a .safetensors or .pt file with one, to begin with.
    threads            torch threads in every node: part of what makes results exact.
    workers            Processes for each node that fetch batches ahead, where the data set takes its time.
    finish             (result) -> None, called by wide.run in the caller's own process once training is over.
    """

    model: Callable[[], Any]
    dataset: Callable[[], Any]
    loss: Callable[[Any, Any], Any] = None  # type: ignore[assignment]  # or phases: _Checked sees to it
    optimizer: Callable[[Any], Any] = None  # type: ignore[assignment]
    phases: Sequence[Phase] = ()
    batch_size: int = DEFAULT_BATCH_SIZE
    batches_per_step: int | None = None
    epochs: float | None = None
    steps: int | None = None
    seed: int = 0
    scheduler: Callable[[Any], Any] | per_epoch | on_metric | None = None
    evaluate: Callable[[Any], dict[str, float]] | None = None
    evaluate_every: int | None = None
    best: str | None = None
    stop_when: Callable[[list[dict[str, float]]], bool] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    order: Any = None
    drop_last: bool = False
    clip_norm: float | None = None
    after_step: Callable[[Any, Any], None] | None = None
    init: Any = None
    threads: int = 1
    workers: int = 0
    finish: Callable[[Any], None] | None = None

    @property
    def turns(self) -> Sequence[Phase]:
        """Its phases; one, if it has no others."""
        return self.phases or (Phase(self.loss, self.optimizer),)

    @property
    def own_loop(self) -> OwnLoop | None:
        """Does a loop of the user's own compute, instead of a loss?"""
        return getattr(self.loss, "own_loop", None)

    @property
    def is_judged(self) -> bool:
        """Does anything follow from evaluations? Then training waits for them."""
        return self.stop_when is not None or self.best is not None or isinstance(self.scheduler, on_metric)

    def goes_by(self, metric: str) -> bool:
        """May what follows from evaluations follow from this one?"""
        waits_for = self.scheduler.metric if isinstance(self.scheduler, on_metric) else None
        return self.stop_when is not None or metric in (waits_for, (self.best or "").lstrip("-") or None)

    def __post_init__(self) -> None:
        self._check_functions()
        for name in ("batch_size", "batches_per_step", "threads", "evaluate_every"):
            value = getattr(self, name)
            is_left_out = value is None and name in ("batches_per_step", "evaluate_every")
            if not is_left_out and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"Job({name}=…) must be a whole number of at least 1, got {value!r}")
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
        if not isinstance(self.drop_last, bool):
            raise UsageError(f"Job(drop_last=…) must be True or False, got {self.drop_last!r}")
        if self.best is not None and (not isinstance(self.best, str) or not self.best.lstrip("-")):
            raise UsageError(f'Job(best=…) must be the name of a metric, "accuracy" or "-loss", got {self.best!r}')

    def _check_functions(self) -> None:
        """Where something else is given, say what to write."""
        kind = type(self.model).__name__
        if _is_module(self.model):
            raise UsageError(
                f"Job(model=…) got a {kind} that is built already: give a function that builds it, "
                f"model=lambda: {kind}(…), so that every machine begins with the same weights"
            )
        if self.phases:
            self._check_phases()
        for loss in (phase.loss for phase in self.turns):
            if _is_module(loss) or getattr(loss, "__module__", "") == "torch.nn.functional":
                what = f"nn.{type(loss).__name__}()" if _is_module(loss) else f"F.{loss.__name__}"
                raise UsageError(
                    f"Job(loss=…) is called with (model, batch), and {what} compares predictions with targets: "
                    f"write loss=wide.supervised({what})"
                )
        for name in (*(FUNCTIONS[:2] if self.phases else FUNCTIONS), *OPTIONAL):
            value = getattr(self, name)
            if isinstance(value, per_epoch | on_metric):
                value = value.build
            if name == "order" and hasattr(value, "ids"):
                continue  # one of wide.order
            if not callable(value) and (name in FUNCTIONS or value is not None):
                or_none = "" if name in FUNCTIONS else " or None"
                kind = type(value).__name__
                hint = (
                    f": write {name}=lambda{' params' if name == 'optimizer' else ''}: …" if name in FUNCTIONS else ""
                )
                raise UsageError(f"Job({name}=…) must be a function{or_none}, got {kind}{hint}")

    def _check_phases(self) -> None:
        if self.loss is not None or self.optimizer is not None:
            raise UsageError("Job(phases=…) have losses and optimizers of their own: leave out loss and optimizer")
        if not isinstance(self.phases, list | tuple):
            raise UsageError(
                f"Job(phases=…) is a list of wide.Phase(loss, optimizer), got {type(self.phases).__name__}"
            )
        for phase in self.phases:
            if not isinstance(phase, Phase) or not (callable(phase.loss) and callable(phase.optimizer)):
                raise UsageError(
                    f"Job(phases=…) is a list of wide.Phase(loss, optimizer), got a {type(phase).__name__}"
                )


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


class total:  # noqa: N801  (reads as a function: return wide.total(losses.sum(), mask.sum()))
    """A loss that is a sum over `count` things (tokens, pixels, weights), which are not the same in every batch: the
    step's gradient is that of the sum of all sums, over the sum of all counts.
    """

    def __init__(self, sum: Any, count: Any) -> None:  # noqa: A002  (as people write it)
        self.sum, self.count = sum, count
