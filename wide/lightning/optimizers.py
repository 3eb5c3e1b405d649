"""What configure_optimizers returns, in all of Lightning's forms: one optimizer, its schedulers, and when these are
stepped. Knows nothing of modules or pools.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from wide.errors import UsageError
from wide.job.definition import on_metric, per_epoch

WHERE = "configure_optimizers()"
SCHEDULERS = "_wide_schedulers"  # an attribute of the optimizer: they were made for this one


class Form(NamedTuple):
    """`metric`: what schedulers wait for, if they do."""

    optimizer: torch.optim.Optimizer
    schedulers: list[Any]
    interval: str = "epoch"
    metric: str = ""


class Seldom:
    """A scheduler that is stepped every so many times that it would be."""

    def __init__(self, scheduler: Any, frequency: int) -> None:
        self.scheduler, self.frequency, self.calls = scheduler, frequency, 0

    def step(self, *values: Any) -> None:
        self.calls += 1
        if self.calls % self.frequency == 0:
            self.scheduler.step(*values)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        self.scheduler.load_state_dict(self.scheduler.state_dict() | state["scheduler"])


def understood(said: Any) -> Form:
    """What a module's configure_optimizers returned."""
    optimizers, found, monitor = _parts(said)
    if len(optimizers) != 1:
        raise UsageError(
            f"{WHERE} returned {len(optimizers)} optimizers: a pool that calls training_step has one; put their "
            "parameters into groups of one optimizer, or write wide.Job(phases=…)"
        )
    optimizer = optimizers[0]
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UsageError(f"{WHERE} returned {type(optimizer).__name__}, not an optimizer of torch's kind")
    ways = [_Way.of(each, monitor) for each in found]
    if any(getattr(way.scheduler, "optimizer", optimizer) is not optimizer for way in ways):
        raise UsageError(f"{WHERE}: a scheduler belongs to another optimizer than the one that is returned")
    if len({(way.interval, way.metric) for way in ways}) > 1:
        raise UsageError(f"{WHERE}: schedulers are stepped at different times: give all one interval and one monitor")
    schedulers = [way.made for way in ways]
    return Form(optimizer, schedulers, ways[0].interval, ways[0].metric) if ways else Form(optimizer, [])


def scheduler_of(form: Form) -> Any:
    """As a Job says it."""
    if not form.schedulers:
        return None
    if form.metric:
        return on_metric(form.metric, made_with)
    return per_epoch(made_with) if form.interval == "epoch" else made_with


def keep_together(form: Form) -> torch.optim.Optimizer:
    """The optimizer, which knows its schedulers."""
    vars(form.optimizer)[SCHEDULERS] = form.schedulers
    return form.optimizer


def made_with(optimizer: torch.optim.Optimizer) -> list[Any]:
    schedulers: list[Any] = vars(optimizer)[SCHEDULERS]
    return schedulers


class _Way(NamedTuple):
    """A scheduler, and how it is stepped."""

    scheduler: Any
    interval: str
    frequency: int
    metric: str

    @classmethod
    def of(cls, said: Any, monitor: str | None) -> _Way:
        given = said if isinstance(said, dict) else {"scheduler": said, "monitor": monitor}
        if "scheduler" not in given:
            raise UsageError(f'{WHERE}: the dict of a scheduler has no "scheduler" in it')
        scheduler, interval = given["scheduler"], given.get("interval", "epoch")
        frequency = given.get("frequency", 1)
        kind = type(scheduler).__name__
        if not callable(getattr(scheduler, "step", None)):
            raise UsageError(f"{WHERE}: {kind} is no learning-rate scheduler")
        if interval not in ("epoch", "step"):
            raise UsageError(f'{WHERE}: interval is "epoch" or "step", got {interval!r}')
        if not isinstance(frequency, int) or frequency < 1:
            raise UsageError(f"{WHERE}: frequency is a whole number of at least 1, got {frequency!r}")
        waits = given.get("reduce_on_plateau", isinstance(scheduler, ReduceLROnPlateau))
        metric = (given.get("monitor") or "") if waits else ""
        if waits and not metric:
            raise UsageError(f'{WHERE}: {kind} needs a metric: add "monitor": "…"')
        if interval == "step" and (waits or frequency != 1):
            what = f"{kind} waits for a metric" if waits else f"frequency {frequency} counts loaders' batches"
            raise UsageError(f'{WHERE}: {what}, so leave out interval "step", or step {kind} once an epoch')
        return cls(scheduler, interval, frequency, metric)

    @property
    def made(self) -> Any:
        return self.scheduler if self.frequency == 1 else Seldom(self.scheduler, self.frequency)


def _parts(said: Any) -> tuple[list[Any], list[Any], str | None]:
    """Optimizers, schedulers or their dicts, and a metric's name."""
    if said is None:
        raise UsageError(f"{WHERE} returned None: Lightning would then train nothing; return an optimizer")
    if isinstance(said, dict):
        if "optimizer" not in said:
            raise UsageError(f'{WHERE} returned a dict without "optimizer"')
        schedulers = [said["lr_scheduler"]] if said.get("lr_scheduler") is not None else []
        return [said["optimizer"]], schedulers, said.get("monitor")
    if not isinstance(said, list | tuple):
        return [said], [], None
    if len(said) == 2 and isinstance(said[0], list):
        return list(said[0]), list(said[1]) if isinstance(said[1], list | tuple) else [said[1]], None
    if len(said) == 1 and isinstance(said[0], dict):
        return _parts(said[0])
    return list(said), [], None
