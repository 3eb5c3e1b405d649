"""The job's own optimizer and scheduler at work: gradients in, one step of the weights. Knows the user's optimizer;
where the gradients come from, and whether this is the pool's one optimizer or a node's own, is the caller's.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from wide.errors import TrainingFailed
from wide.job.definition import Job, on_metric, per_epoch
from wide.job.elementwise import elementwise_state
from wide.job.hands import ONE, Hands
from wide.job.loading import users_code
from wide.job.seeding import OwnGenerators, generators, mix, seed_everything
from wide.job.slices import Place, Slices

Optimizers = list[torch.optim.Optimizer]


class Descent:
    """Steps of one model. `steps` counts how often the scheduler was stepped."""

    def __init__(self, job: Job, model: nn.Module, trainable: Sequence[str], seed: int) -> None:
        self._clip_norm, self._seed = job.clip_norm, seed
        by_name = dict(model.named_parameters())
        self.parameters = [by_name[name] for name in trainable]
        self._in_order = [parameter for name, parameter in by_name.items() if name in set(trainable)]  # the model's own
        wish = job.scheduler
        build = wish.build if isinstance(wish, per_epoch | on_metric) else wish
        self.metric = wish.metric if isinstance(wish, on_metric) else ""
        self._is_by_epoch = isinstance(wish, per_epoch)
        with users_code("building the optimizer or its scheduler failed"):
            self._turns = [built(phase.optimizer, model) for phase in job.turns]
            self.optimizers = [optimizer for turn in self._turns for optimizer in turn]
            made = build(self.optimizers if len(self.optimizers) > 1 else self.optimizers[0]) if build else []
        self.schedulers: list[Any] = list(made) if isinstance(made, list | tuple) else [made]
        for optimizer in self.optimizers:
            _check_closure(optimizer)
        _check_metric(self.schedulers, self.metric)
        self.phases, self.is_clipped = len(self._turns), job.clip_norm is not None
        self._masks = [self._mask(turn) for turn in self._turns]
        self._check_turns()
        for parameter in parameters_of(self.optimizers):
            parameter.grad = None  # model() may have left some, which are nobody's
        self._own = OwnGenerators(optimizer=self.optimizers, scheduler=self.schedulers)
        self._bare_step = _bare_step(self.optimizers[0])
        self._are_known = all(_bare_step(optimizer) is not None for optimizer in self.optimizers)
        self.switches = [optimizer for optimizer in self.optimizers if _switches(optimizer)]
        self._slices: Slices | None = None
        self.train()
        self.steps = 0

    def use_runs(self, places: Sequence[Place], runs: Sequence[torch.Tensor], hands: Hands = ONE) -> None:
        """The parameters lie in these flat runs, and stay there: a step may be made by slices of them."""
        optimizer, step = self.optimizers[0], self._bare_step
        if len(self.optimizers) == 1 and step is not None:
            names = elementwise_state(optimizer, step)
            if names is not None:
                self._slices = Slices(optimizer, step, self.parameters, places, runs, names, hands=hands)

    def _mask(self, optimizers: Optimizers) -> int:
        mine = {id(parameter) for parameter in parameters_of(optimizers)}
        return sum(1 << i for i, parameter in enumerate(self.parameters) if id(parameter) in mine)

    def _check_turns(self) -> None:
        for n, mask in enumerate(self._masks):
            for m, other in enumerate(self._masks[:n]):
                if shared := mask & other:
                    which = self.parameters[(shared & -shared).bit_length() - 1]
                    raise TrainingFailed(
                        f"phases {m} and {n} train the same parameter, of shape {tuple(which.shape)}: give each "
                        "optimizer parameters of its own"
                    )

    @property
    def is_plain(self) -> bool:
        """Is a step −lr · gradient, but for momentum and decay? Then parts of a gradient can be applied one by one."""
        is_sgd = all(type(optimizer) is torch.optim.SGD for optimizer in self.optimizers) and self._clip_norm is None
        is_one = len(self.optimizers) == 1
        return is_sgd and is_one and not any(group.get("maximize") for group in self._groups)

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def rates(self) -> list[float]:
        """The learning rate of each parameter."""
        by_parameter = {id(p): float(group["lr"]) for group in self._groups for p in group["params"]}
        return [by_parameter.get(id(parameter), 0.0) for parameter in self.parameters]

    @property
    def group_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._groups]

    def use_rates(self, rates: Sequence[float]) -> None:
        """As somebody has them who knows more."""
        for group, rate in zip(self._groups, rates, strict=False):
            group["lr"] = rate

    def state(self) -> dict[str, Any]:
        """All that `go_on_from` needs."""
        if self._slices is not None:
            self._slices.tell()
        with users_code("the optimizer or its scheduler cannot say what state it is in"):
            own = [{n: v for n, v in vars(each).items() if _is_own(n, v)} for each in self.optimizers]
            states = [optimizer.state_dict() for optimizer in self.optimizers]
            schedulers = [getattr(scheduler, "state_dict", lambda: None)() for scheduler in self.schedulers]
            return {"steps": self.steps, "optimizers": states, "schedulers": schedulers, "own": own}

    def go_on_from(self, state: Mapping[str, Any]) -> str:
        """Go on where another one was; a scheduler that cannot tell where it is, is stepped until it is there. Returns
        in which way the job's settings are not those that it goes on with, if so.
        """
        if "optimizer" in state:  # as older versions wrote it, of one
            both = {"optimizers": [state["optimizer"]], "own": [state.get("own", {})]}
            state = {**state, **both, "schedulers": [state["scheduler"]] if self.schedulers else []}
        states = state["optimizers"]
        groups = [group for saved in states for group in saved["param_groups"]]
        changed = "" if self.schedulers else self._difference(groups)
        can_tell = all(saved is not None for saved in state["schedulers"])
        if not can_tell:
            self._step_schedulers(state["steps"])  # before the optimizer, which remembers its learning rates
        with users_code("the optimizer or its scheduler does not take back its state"):
            for optimizer, saved, own in zip(self.optimizers, states, state["own"], strict=True):
                optimizer.load_state_dict(saved)
                _keep_dtypes(optimizer, saved)
                vars(optimizer).update(own)
            if can_tell:
                for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
                    scheduler.load_state_dict(scheduler.state_dict() | saved)  # functions stay
                self.steps = state["steps"]
        if self._slices is not None:
            self._slices.forget()
        return changed

    def _difference(self, saved: Sequence[Mapping[str, Any]]) -> str:
        for mine, theirs in zip(self._groups, saved, strict=False):
            for name, value in mine.items():
                if isinstance(value, int | float | tuple) and name in theirs and theirs[name] != value:
                    return f"{name} {value} in the job, {theirs[name]} in the run"
        return ""

    def step(
        self, gradients: Sequence[torch.Tensor], touched: int, number: int, runs: Sequence[torch.Tensor] = ()
    ) -> None:
        """One step; bit i of `touched` says that parameter i has a gradient at all. `number` is the step's own. Of
        several phases those make a step whose parameters have one. `runs` are the gradients' own memory, if that lies
        as the parameters' does.
        """
        with generators, users_code("the optimizer's step failed"):
            if self._clip_norm is not None:
                self._give(gradients, touched)
                nn.utils.clip_grad_norm_(self._in_order, self._clip_norm)
            if self._slices is not None and self._step_by_slices(touched, runs):
                return
            self._give(gradients, touched)
            if self.is_bare:
                self._bare_step(self.optimizers[0])
                return
            seed_everything(mix(self._seed, number))  # for optimizers that add noise
            self._own.seed(mix(self._seed, number))
            for turn, mask in zip(self._turns, self._masks, strict=True):
                if len(self._turns) == 1 or touched & mask:
                    for optimizer in turn:
                        optimizer.step()

    def _give(self, gradients: Sequence[torch.Tensor], touched: int) -> None:
        for i, (parameter, gradient) in enumerate(zip(self.parameters, gradients, strict=True)):
            parameter.grad = gradient if touched >> i & 1 else None

    def _step_by_slices(self, touched: int, runs: Sequence[torch.Tensor]) -> bool:
        """If all have a gradient, and nobody wants to know when there is a step. Once it cannot be, it never will: the
        parameters' counters differ then.
        """
        assert self._slices is not None
        optimizer = self.optimizers[0]
        is_whole = bool(runs) and touched == (1 << len(self.parameters)) - 1
        if is_whole and self._are_stepped_plainly and self._slices.step(runs):
            optimizer._opt_called = True  # type: ignore[attr-defined]  # schedulers look for that
            return True
        self._slices.tell()
        if optimizer.state:  # else it was the first step, which makes it
            self._slices = None
        return False

    @property
    def _are_stepped_plainly(self) -> bool:
        """Are optimizers torch's own, without hooks? A scheduler puts a note of its own around their step."""
        own = (vars(optimizer).get("step") for optimizer in self.optimizers)
        return (
            self._are_known
            and all(step is None or getattr(step, "_wrapped_by_lr_sched", False) for step in own)
            and not self._have_hooks
        )

    @property
    def _have_hooks(self) -> bool:
        theirs = any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in self.optimizers)
        return theirs or bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)

    @property
    def is_bare(self) -> bool:
        """Is a step torch's own code, and nothing else? Then it draws no random numbers, and touches no parameter that
        has no gradient. torch wraps it for its profiler, which takes longer than a small model's step: not here.
        """
        return not self.schedulers and len(self.optimizers) == 1 and self.is_torchs

    @property
    def is_torchs(self) -> bool:
        """Are optimizers and schedulers torch's own, without hooks?"""
        return (
            self._are_known
            and all(type(scheduler).__module__.startswith("torch.optim.") for scheduler in self.schedulers)
            and not any("step" in vars(optimizer) for optimizer in self.optimizers)
            and not self._have_hooks
        )

    def advance(self, steps: int, epochs: int) -> None:
        """Bring the scheduler to where the run is: it is stepped once for each update of the model, or each epoch."""
        if self.schedulers and not self.metric:
            self._step_schedulers(epochs if self._is_by_epoch else steps)

    def judge(self, value: float) -> None:
        """What a scheduler goes by that waits for a metric."""
        with generators, users_code("the scheduler's step failed"):
            for scheduler in self.schedulers:
                scheduler.step(value)

    def _step_schedulers(self, times: int) -> None:
        with generators, users_code("the scheduler's step failed"):
            while self.steps < times:
                with warnings.catch_warnings():
                    if not self.steps:  # torch would like to see a step of the optimizer first; a late comer has none
                        warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step", UserWarning)
                    for scheduler in self.schedulers:
                        scheduler.step()
                self.steps += 1

    def question(self, epochs: float | None, steps_per_epoch: int) -> str:
        """Is a scheduler stepped once an update, whose numbers look as if they were epochs? Worth a word."""
        if self._is_by_epoch or self.metric or epochs is None or steps_per_epoch < 2:
            return ""
        for scheduler in self.schedulers:
            values = {
                name: getattr(scheduler, name, None) for name in ("step_size", "T_max", "milestones", "total_iters")
            }
            for name, value in values.items():
                last = max(value, default=0) if isinstance(value, Iterable) else value
                if isinstance(last, int) and 0 < last <= epochs:
                    kind = type(scheduler).__name__
                    return (
                        f"{kind}({name}={last}) is stepped once an update, and an epoch has {steps_per_epoch} of them: "
                        f"if epochs are meant, write scheduler=wide.per_epoch(lambda optimizer: {kind}(…))"
                    )
        return ""

    def rest(self) -> None:
        """From now on the weights are those to be kept, where an optimizer trains with others."""
        with users_code("the optimizer's eval() failed"):
            for optimizer in self.switches:
                optimizer.eval()  # type: ignore[attr-defined]

    def train(self) -> None:
        with users_code("the optimizer's train() failed"):
            for optimizer in self.switches:
                optimizer.train()  # type: ignore[attr-defined]


def built(factory: Callable[[Any], Any], model: nn.Module) -> Optimizers:
    """What the user's function makes of the model's parameters, or of the model, if it asks for that."""
    wants_model = False
    with contextlib.suppress(TypeError, ValueError):
        wants_model = next(iter(inspect.signature(factory).parameters), "") == "model"
    try:
        made = factory(model if wants_model else list(model.parameters()))
    except AttributeError as error:
        if "'list' object has no attribute" not in str(error):
            raise
        raise TrainingFailed(
            f"optimizer is given the list of the model's parameters, not the model ({error}): write "
            "optimizer=lambda model: …, if it needs the model"
        ) from None
    optimizers = list(made) if isinstance(made, list | tuple) else [made]
    if not optimizers:
        raise TrainingFailed("optimizer returned an empty list: return an optimizer, or several")
    for optimizer in optimizers:
        if not isinstance(getattr(optimizer, "param_groups", None), list):
            raise TrainingFailed(f"optimizer returned {type(optimizer).__name__}, not an optimizer or a list of them")
    return optimizers


def parameters_of(optimizers: Optimizers) -> list[nn.Parameter]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _switches(optimizer: Any) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _keep_dtypes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """torch gives state the dtype of its parameter; but an optimizer may keep fp32 state for bf16 weights."""
    in_order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in saved.get("state", {}).items():
        mine = optimizer.state.get(in_order[index], {}) if isinstance(index, int) else {}
        for name, value in values.items():
            if torch.is_tensor(value) and torch.is_tensor(mine.get(name)) and mine[name].dtype != value.dtype:
                mine[name] = value.clone()


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


def _check_metric(schedulers: Sequence[Any], metric: str) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    if not metric and any(isinstance(scheduler, plateau) for scheduler in schedulers):
        raise TrainingFailed(
            "ReduceLROnPlateau needs a metric whenever it is stepped: write "
            'scheduler=wide.on_metric("loss", lambda optimizer: ReduceLROnPlateau(optimizer, …))'
        )


def _check_closure(optimizer: torch.optim.Optimizer) -> None:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingFailed(
            f"{type(optimizer).__name__} computes the loss again and again within one step (it needs a closure), "
            "which a pool cannot do: use an optimizer such as SGD or AdamW"
        )
