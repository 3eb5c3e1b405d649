"""The job's own optimizer and scheduler at work: gradients in, one step of the weights. Knows the user's optimizer;
where the gradients come from, and whether this is the pool's one optimizer or a node's own, is the caller's.
"""

from __future__ import annotations

import inspect
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.job.seeding import OwnGenerators, generators, mix, seed_everything


class Descent:
    """Steps of one model. `steps` counts how often the scheduler was stepped."""

    def __init__(self, job: Job, model: nn.Module, trainable: Sequence[str], seed: int) -> None:
        self._clip_norm, self._seed = job.clip_norm, seed
        by_name = dict(model.named_parameters())
        self.parameters = [by_name[name] for name in trainable]
        with users_code("building the optimizer or its scheduler failed"):
            self.optimizer = _optimizer(job, model)
            self.scheduler = job.scheduler(self.optimizer) if job.scheduler else None
        _check_closure(self.optimizer)
        _check_metric(self.scheduler)
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None  # model() may have left some, which are nobody's
        self._own = OwnGenerators(optimizer=self.optimizer, scheduler=self.scheduler)
        self._bare_step = _bare_step(self.optimizer)
        self.steps = 0

    @property
    def is_plain(self) -> bool:
        """Is a step −lr · gradient, but for momentum and decay? Then parts of a gradient can be applied one by one."""
        is_sgd = type(self.optimizer) is torch.optim.SGD and self._clip_norm is None
        return is_sgd and not any(group.get("maximize") for group in self.optimizer.param_groups)

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter."""
        by_parameter = {id(p): float(group["lr"]) for group in self.optimizer.param_groups for p in group["params"]}
        return [by_parameter.get(id(parameter), 0.0) for parameter in self.parameters]

    def state(self) -> dict[str, Any]:
        """All that `go_on_from` needs."""
        with users_code("the optimizer or its scheduler cannot say what state it is in"):
            state_of = getattr(self.scheduler, "state_dict", lambda: None)
            own = {name: value for name, value in vars(self.optimizer).items() if _is_own(name, value)}
            return {"steps": self.steps, "optimizer": self.optimizer.state_dict(), "scheduler": state_of(), "own": own}

    def go_on_from(self, state: Mapping[str, Any]) -> str:
        """Go on where another one was; a scheduler that cannot tell where it is, is stepped until it is there. Returns
        in which way the job's settings are not those that it goes on with, if so.
        """
        changed = "" if self.scheduler is not None else self._difference(state["optimizer"]["param_groups"])
        if state["scheduler"] is None:
            self.advance(state["steps"])  # before the optimizer, which remembers its learning rates
        with users_code("the optimizer or its scheduler does not take back its state"):
            self.optimizer.load_state_dict(state["optimizer"])
            self._keep_dtypes(state["optimizer"])
            vars(self.optimizer).update(state.get("own", {}))
            if self.scheduler is not None and state["scheduler"] is not None:
                self.scheduler.load_state_dict(self.scheduler.state_dict() | state["scheduler"])  # functions stay
                self.steps = state["steps"]
        return changed

    def _difference(self, saved: Sequence[Mapping[str, Any]]) -> str:
        for mine, theirs in zip(self.optimizer.param_groups, saved, strict=False):
            for name, value in mine.items():
                if isinstance(value, int | float | tuple) and name in theirs and theirs[name] != value:
                    return f"{name} {value} in the job, {theirs[name]} in the run"
        return ""

    def _keep_dtypes(self, saved: Mapping[str, Any]) -> None:
        """torch gives state the dtype of its parameter; but an optimizer may keep fp32 state for bf16 weights."""
        in_order = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for index, values in saved.get("state", {}).items():
            mine = self.optimizer.state.get(in_order[index], {}) if isinstance(index, int) else {}
            for name, value in values.items():
                if torch.is_tensor(value) and torch.is_tensor(mine.get(name)) and mine[name].dtype != value.dtype:
                    mine[name] = value.clone()

    def step(self, gradients: Sequence[torch.Tensor], touched: int, number: int) -> None:
        """One step; bit i of `touched` says that parameter i has a gradient at all. `number` is the step's own."""
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = gradient if touched >> i & 1 else None
        with generators, users_code("the optimizer's step failed"):
            if self._clip_norm is not None:
                nn.utils.clip_grad_norm_(self.parameters, self._clip_norm)
            if self.is_bare:
                self._bare_step(self.optimizer)
                return
            seed_everything(mix(self._seed, number))  # for optimizers that add noise
            self._own.seed(mix(self._seed, number))
            self.optimizer.step()

    @property
    def is_bare(self) -> bool:
        """Is a step torch's own code, and nothing else? Then it draws no random numbers, and touches no parameter that
        has no gradient. torch wraps it for its profiler, which takes longer than a small model's step: not here.
        """
        return self.scheduler is None and self.is_torchs

    @property
    def is_torchs(self) -> bool:
        """Are optimizer and scheduler torch's own, without hooks?"""
        optimizer, scheduler = self.optimizer, self.scheduler
        return (
            self._bare_step is not None
            and (scheduler is None or type(scheduler).__module__.startswith("torch.optim."))
            and "step" not in vars(optimizer)
            and not (optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
            and not (_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
        )

    def advance(self, steps: int) -> None:
        """Bring the scheduler to where the run is: it is stepped once for each update of the model."""
        if self.scheduler is None:
            return
        with generators, users_code("the scheduler's step failed"):
            while self.steps < steps:
                self._scheduler_step()
                self.steps += 1

    def _scheduler_step(self) -> None:
        assert self.scheduler is not None
        if self.steps:
            self.scheduler.step()
            return
        with warnings.catch_warnings():  # torch would like to see a step of the optimizer first; a late comer has none
            warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step", UserWarning)
            self.scheduler.step()


def _bare_step(optimizer: torch.optim.Optimizer) -> Any:
    """torch's own step without what is wrapped around it; None, if the optimizer is somebody else's."""
    kind = type(optimizer)
    step = getattr(kind.step, "__wrapped__", None) if getattr(kind.step, "hooked", False) else None
    is_torchs = kind.__module__.startswith("torch.optim.") and getattr(torch.optim, kind.__name__, None) is kind
    return step if is_torchs and getattr(step, "__module__", "").startswith("torch.optim.") else None


def _is_own(name: str, value: Any) -> bool:
    """An attribute of an optimizer that its state dict does not have: a counter, a history, slow weights."""
    return name not in ("state", "param_groups", "defaults") and not name.startswith("_") and _is_plain(value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple | deque):
        return all(_is_plain(item) for item in value)
    if isinstance(value, dict):
        return all(isinstance(key, str | int) and _is_plain(item) for key, item in value.items())
    is_tensor = isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter)
    return is_tensor or value is None or isinstance(value, bool | int | float | str)


def _optimizer(job: Job, model: nn.Module) -> torch.optim.Optimizer:
    try:
        optimizer: torch.optim.Optimizer = job.optimizer(list(model.parameters()))
    except AttributeError as error:
        if "'list' object has no attribute" not in str(error):
            raise
        raise TrainingFailed(
            f"optimizer is given the list of the model's parameters, not the model ({error}): write "
            "optimizer=lambda params: torch.optim.SGD(params, lr=0.1)"
        ) from None
    return optimizer


def _check_metric(scheduler: Any) -> None:
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TrainingFailed(
            "ReduceLROnPlateau needs a metric whenever it is stepped, which is once per update here: use a scheduler "
            "that goes by steps, such as CosineAnnealingLR"
        )


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingFailed(
            f"{type(optimizer).__name__} computes the loss again and again within one step (it needs a closure), "
            "which a pool cannot do: use an optimizer such as SGD or AdamW"
        )
