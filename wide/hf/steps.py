"""The trainer's optimizer and scheduler for another copy of its model: made by its own create_optimizer() and
create_scheduler(), or those that it was given, with the copy's parameters in the place of the model's.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from wide.errors import UsageError
from wide.hf.light import Light
from wide.job.definition import on_metric

Params = dict[int, nn.Parameter]


class Optimizer:
    """(model) -> the optimizer."""

    def __init__(self, trainer: Any, light: Light) -> None:
        self._light, self._source = light, trainer.model
        self._given = _unwrapped(trainer.optimizer)
        self._kind = getattr(trainer, "optimizer_cls_and_kwargs", None)
        mine = {id(parameter) for parameter in trainer.model.parameters()}
        groups = self._given.param_groups if self._given is not None else []
        if any(id(parameter) not in mine for group in groups for parameter in group["params"]):
            raise UsageError(
                "wide.hf.job: optimizers=(…) has parameters that are not the model's: make it of trainer.model"
            )

    def __call__(self, model: nn.Module) -> Any:
        theirs = _counterparts(self._source, model)
        if self._given is not None:
            return _with_steps_noted(_again(self._given, dict(theirs)))
        trainer = self._light.at(model)
        if self._kind is not None:
            trainer.optimizer_cls_and_kwargs = copy.deepcopy(self._kind, dict(theirs))
        takes_model = len(inspect.signature(trainer.create_optimizer).parameters) > 0
        made = trainer.create_optimizer(model) if takes_model else trainer.create_optimizer()
        return trainer.optimizer if made is None else made


def _unwrapped(optimizer: Any) -> Any:
    """An earlier train() has put accelerate's around it. What its maker has put around it stays."""
    is_accelerates = type(optimizer).__module__.partition(".")[0] == "accelerate"
    return optimizer.optimizer if is_accelerates else optimizer


class Scheduler:
    """(optimizer) -> the scheduler, of a training of so many steps."""

    def __init__(self, trainer: Any, light: Light, steps: int) -> None:
        self._light, self._source, self._steps, self._given = light, trainer.model, steps, given(trainer)

    def __call__(self, optimizer: Any) -> Any:
        if self._given is not None:
            return copy.deepcopy(self._given, {id(self._given.optimizer): optimizer})
        trainer = self._light.at(self._source)
        trainer.optimizer = optimizer
        made = trainer.create_scheduler(self._steps, optimizer)
        return trainer.lr_scheduler if made is None else made


def given(trainer: Any) -> Any:
    """The scheduler of the trainer's maker; None, if it has none, or one that an earlier train() made for itself."""
    return None if getattr(trainer, "_created_lr_scheduler", False) else trainer.lr_scheduler


def scheduled(trainer: Any, scheduler: Scheduler, metric: str | None) -> Scheduler | on_metric:
    """Some wait for a metric."""
    kind = str(getattr(trainer.args.lr_scheduler_type, "value", trainer.args.lr_scheduler_type))
    theirs = given(trainer)
    waits = kind in ("reduce_lr_on_plateau", "greedy") if theirs is None else "metrics" in _parameters(theirs.step)
    if not waits:
        return scheduler
    if metric is None:
        raise UsageError(
            "wide.hf.job: this scheduler waits for a metric: say metric_for_best_model and an eval_strategy"
        )
    return on_metric(metric, scheduler)


def rates(
    optimizer: Callable[[Any], Any], scheduler: Callable[[Any], Any], model: nn.Module, steps: int
) -> list[float]:
    """The learning rate of each step, of the first group: by making all of the scheduler's steps and none of the
    optimizer's.
    """
    made = optimizer(model)
    made._opt_called = True  # or torch warns that it made no step
    planned, found = scheduler(made), []
    for _ in range(steps):
        found.append(float(made.param_groups[0]["lr"]))
        made._opt_called = True
        planned.step()
    return found


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _counterparts(source: nn.Module, model: nn.Module) -> Params:
    theirs = dict(model.named_parameters(remove_duplicate=False))
    return {id(mine): theirs[name] for name, mine in source.named_parameters(remove_duplicate=False)}


def _again(optimizer: Any, memo: dict[int, Any]) -> Any:
    """Torch pickles an optimizer's groups and state; one of the user's may keep more."""
    made = copy.deepcopy(optimizer, memo)
    for name, value in vars(optimizer).items():
        if name not in vars(made) and name != "step":
            vars(made)[name] = copy.deepcopy(value, memo)
    return made


def _with_steps_noted(optimizer: Any) -> Any:
    """A scheduler that is made of an optimizer puts a note around its step; this one's was made of another."""
    step, mine = type(optimizer).step, weakref.ref(optimizer)

    @functools.wraps(step)
    def noted(*args: Any, **kwargs: Any) -> Any:
        it = mine()
        assert it is not None
        it._opt_called = True
        return step(it, *args, **kwargs)

    noted._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = noted
    return optimizer
