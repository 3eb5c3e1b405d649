"""`wide.local(model, optimizer, every=H)`: any loop at all. It makes its own steps, on its own data; each H of them
what it has learned is averaged with what others have. Not exact: who was there shows in the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from wide.codec.layout import unbind
from wide.errors import TrainingFailed, UsageError
from wide.job.definition import OwnLoop
from wide.job.here import enter, leave, listen
from wide.job.loading import is_importing
from wide.job.script import Entered
from wide.job.seeding import mix, seed_everything
from wide.job.steps import job_of_steps
from wide.launch.own_loops import Served, failed, find_seat
from wide.node.own_loop import LoopLoss, Stepped
from wide.node.turns import Over
from wide.telemetry.log import log

Models = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
LOSS = "loss"  # what the loop logs by this name is shown as its loss


class Meetings:
    """A loop's place in a pool. `node` is its number there, from 1; `is_over`: the pool is gone, or at its end, and
    the loop goes on by itself.
    """

    def __init__(self, model: Models, optimizer: Optimizers, every: int, invite: str | None) -> None:
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise UsageError(f"wide.local(every=…) is a whole number of steps, at least 1, got {every!r}")
        self._model, self._every, self._invite = _one_module(model), every, invite
        self._optimizers = _optimizers(optimizer, self._model)
        self._others_step = self._has_stepped = False
        self._logged: dict[str, float] = {}
        self._served: Served | None = None
        self._hook: Any = None
        self.is_over = False

    @property
    def node(self) -> int:
        return self._served.node if self._served is not None else 0

    def __enter__(self) -> Self:
        threads = torch.get_num_threads()
        if is_importing():
            raise Entered(job_of_steps(self._model.cpu(), self._every, threads))
        seed = torch.initial_seed() % 2**63  # before the session draws anything
        loss = LoopLoss(OwnLoop(self._every))
        job = job_of_steps(self._model, self._every, threads, loss)
        served = self._served = Served(job, self._model, loss, find_seat("wide.local", self._invite))
        served.start()
        try:
            self._meet()
        except Over as over:
            served.close()
            raise over.error or UsageError(f"wide.local: {over}") from None
        seed_everything(mix(seed, served.node))  # else all would draw the same data
        self._hook = register_optimizer_step_post_hook(self._stepped)
        return self

    def _meet(self) -> None:
        """The session has its turn, and gives it back."""
        assert self._served is not None
        enter(self._served.turns.take().here)
        self._logged = listen()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.is_over or self._served is None or not self._counts(optimizer):
            return
        loss = self._logged.pop(LOSS, None)
        if loss is not None and not math.isfinite(loss):
            raise TrainingFailed(f"wide.log({LOSS}={loss}): lower the learning rate, or clip gradients")
        self._served.turns.give(Stepped(loss, dict(self._logged)))
        try:
            self._meet()
        except Over as over:
            self.is_over = True
            leave()
            if over.error is not None:
                raise over.error from None
            log.info("%s; this loop goes on by itself", over)

    def _counts(self, optimizer: torch.optim.Optimizer) -> bool:
        """Is it the one that ends a round? Another one may train what it likes, but for these models."""
        if optimizer is self._optimizers[-1]:
            self._has_stepped = True
            return True
        if any(optimizer is known for known in self._optimizers):
            self._others_step = True
        elif _trains(optimizer, self._model):
            raise UsageError(
                f"wide.local: another {type(optimizer).__name__} makes steps of the models given: give it, too, and "
                "make optimizers before"
            )
        return False

    def __exit__(self, kind: object, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._served is not None
        leave()
        if self._hook is not None:
            self._hook.remove()
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._served.leave(failed(error))
        elif not self.is_over:
            self._served.turns.give(None)  # what it has done since the last meeting is handed in
        self._served.close()
        unbind(self._model)
        if error is None and self._others_step and not self._has_stepped:
            raise UsageError(
                f"wide.local: {type(self._optimizers[-1]).__name__}, the last optimizer given, made no step, so there "
                "was no meeting: give that one last which ends a round"
            )


def local(model: Models, optimizer: Optimizers, every: int = 100, *, invite: str | None = None) -> Meetings:
    """`with wide.local(model, optimizer, every=100): …` around a loop that stays as it is. Several models are a list,
    or a dict with their names. Of several optimizers the last one counts: give that one last which ends a round.
    """
    return Meetings(model, optimizer, every, invite)


def _one_module(model: Models) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, Mapping):
        named = list(model.items())
    elif isinstance(model, Sequence) and not isinstance(model, str):
        named = [(type(one).__name__.lower(), one) for one in model]
    else:
        raise UsageError(f"wide.local takes a model, a list of models, or a dict, got {type(model).__name__}")
    names = [name for name, _ in named]
    for name, one in named:
        if not isinstance(one, nn.Module):
            raise UsageError(f"wide.local: {name} is a {type(one).__name__}, not a torch.nn.Module")
        if names.count(name) > 1:
            raise UsageError(
                f'wide.local: two models are called {name}: give them names, {{"{name}_a": …, "{name}_b": …}}'
            )
        if not isinstance(name, str) or not name or "." in name:
            raise UsageError(f"wide.local: a model's name is a text without dots, got {name!r}")
    if not named:
        raise UsageError("wide.local: the list of models is empty")
    return nn.ModuleDict(dict(named))


def _optimizers(optimizer: Optimizers, model: nn.Module) -> list[torch.optim.Optimizer]:
    optimizers = [optimizer] if not isinstance(optimizer, Sequence) else list(optimizer)
    if not optimizers:
        raise UsageError("wide.local: the list of optimizers is empty")
    for each in optimizers:
        if not isinstance(each, torch.optim.Optimizer):
            raise UsageError(
                f"wide.local takes torch optimizers, which say when they have made a step, got {type(each).__name__}"
            )
        if not _trains(each, model):
            raise UsageError(
                f"wide.local: {type(each).__name__} trains none of the parameters of the models given: give its model"
            )
        if not _trains(each, model, all):
            raise UsageError(
                f"wide.local: {type(each).__name__} trains parameters that are in none of the models given, so each "
                "node would have its own: give their module, too"
            )
    return optimizers


def _trains(optimizer: torch.optim.Optimizer, model: nn.Module, how: Callable[[Iterable[bool]], bool] = any) -> bool:
    mine = {id(parameter) for parameter in model.parameters()}
    return how(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])
