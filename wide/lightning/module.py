"""The user's module on its own: its class, with answers of ours where a Trainer would be asked. Knows what a
LightningModule asks for; knows nothing of data.
"""

from __future__ import annotations

import copy
import dis
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from wide.errors import UsageError
from wide.job.here import log
from wide.job.reach import KNOWN  # torch's own attributes: parameters, hooks, …
from wide.lightning.kept import Keepers, lengths
from wide.lightning.refuse import TRANSFER, class_of, overrides
from wide.lightning.standin import Plan, StandIn, Unanswered, place

LIBRARIES = ("torch", "torchmetrics", "torchvision", "torchaudio", "transformers")  # whose modules keep no lists


class Notes(NamedTuple):
    """What is known of a model for good, once it is built."""

    plan: Plan
    base: type
    takes: int  # arguments of training_step: the batch, its number
    asks: bool  # does training_step look at the batch's number?
    takes_to_validate: int
    transfers: list[str]  # hooks around batches, if there are any
    metrics: list[Any]  # of torchmetrics
    keepers: Keepers  # attributes of modules; how long containers were


class Alone:
    """Comes before the user's class, and answers in the Trainer's place."""

    _wide: Notes

    @property
    def _values(self) -> Any:
        """Where an evaluation's metrics go; None in training."""
        return vars(self).get("_validation")

    @property
    def trainer(self) -> StandIn:
        return StandIn(self._wide.plan, is_validating=self._values is not None)

    @property
    def current_epoch(self) -> int:
        return place().epoch

    @property
    def global_step(self) -> int:
        return place().step

    @property
    def logger(self) -> None:
        return None

    @property
    def loggers(self) -> list[Any]:
        return []

    def log(self, name: str, value: Any, *_: Any, **options: Any) -> None:
        if self._values is not None:
            self._values.log(name, value, options)
        else:
            log(**{name: of_batch(name, value)})

    def log_dict(self, dictionary: Any, *_: Any, **options: Any) -> None:
        for name, value in dictionary.items():
            self.log(name, value, **options)

    def print(self, *what: Any, **options: Any) -> None:
        print(*what, **options)

    def all_gather(self, data: Any, *_: Any, **__: Any) -> Any:
        return data

    def optimizers(self, *_: Any, **__: Any) -> Any:
        raise Unanswered(
            "self.optimizers(): only the coordinator has the optimizer; schedules belong into its scheduler"
        )

    def lr_schedulers(self) -> Any:
        raise Unanswered("self.lr_schedulers(): only the coordinator has them; it steps them")


def copied(module: Any) -> Any:
    """Without its Trainer, if it has one."""
    was = vars(module).get("_fabric")
    try:
        vars(module)["_fabric"] = None
        return copy.deepcopy(module)
    except Exception as error:
        kind = type(module).__name__
        why = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise UsageError(f"wide.lightning.job: {kind} cannot be copied for the nodes ({why})") from None
    finally:
        vars(module)["_fabric"] = was


def alone(model: Any, plan: Plan, base: type) -> Any:
    """The model itself, from now on by itself; and all Lightning modules within it."""
    notes = Notes(
        plan, base, *_asked_for(model.training_step), _places(model.validation_step), _transfers(model, base), [], []
    )
    for module in model.modules():
        if class_of(module, "LightningModule"):
            own = type(module)
            kind = type(
                own.__name__, (Alone, own), {"_wide": notes, "__module__": __name__, "__qualname__": own.__name__}
            )
            object.__setattr__(module, "__class__", kind)
    return model


def as_it_was(model: Any) -> None:
    """Of the user's own class again, once training is over."""
    for module in model.modules():
        if isinstance(module, Alone):
            object.__setattr__(module, "__class__", type(module).__mro__[2])


def take_notes(model: Any) -> None:
    """Once the model is whole."""
    notes: Notes = model._wide
    notes.metrics[:] = metrics_in(model)
    for module in model.modules():
        if type(module).__module__ == __name__ or type(module).__module__.partition(".")[0] not in LIBRARIES:
            own = {name: value for name, value in vars(module).items() if name not in KNOWN}
            notes.keepers.append((vars(module), lengths(own)))
            notes.keepers.extend((inner, lengths(inner)) for inner in own.values() if type(inner) is dict)


def metrics_in(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if is_metric(module)]


def is_metric(value: Any) -> bool:
    """Of torchmetrics, whichever it is."""
    return any(k.__name__ == "Metric" and k.__module__.startswith("torchmetrics") for k in type(value).__mro__)


def of_batch(name: str, value: Any) -> Any:
    """A number: of a metric object that of this batch, for each batch begins with none."""
    if is_metric(value):
        cached = getattr(value, "_forward_cache", None)
        value = cached if cached is not None else value.compute()
    if isinstance(value, dict):
        raise UsageError(f"self.log({name!r}, …) takes one number, got a dict: write self.log_dict(…)")
    return value


def transferred(model: Any, batch: Any) -> Any:
    """By the module's own hooks, if it has any. The batch is on the device already."""
    for name in model._wide.transfers:
        hook = getattr(model, name)
        batch = hook(batch, model.device, 0) if name == TRANSFER[1] else hook(batch, 0)
    return batch


def _transfers(model: Any, base: type) -> list[str]:
    return [name for name in TRANSFER if overrides(model, base, name)]


def _asked_for(step: Callable[..., Any]) -> tuple[int, bool]:
    """How many arguments training_step takes, and whether it looks at the second."""
    kinds = inspect.Parameter
    parameters = list(inspect.signature(step).parameters.values())
    if any(parameter.kind is kinds.VAR_POSITIONAL for parameter in parameters):
        return 2, True
    places = [p.name for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(places) < 2:
        return 1, False
    return 2, inspect.unwrap(step) is not step or _names(step, places[1])


def _places(step: Callable[..., Any]) -> int:
    """How many arguments it takes by their place."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters
    )


def _names(step: Any, name: str) -> bool:
    """Does its code use this argument at all? Most do not, and then nobody needs to know how long an epoch is."""
    code = getattr(step, "__code__", None)
    if code is None:
        return True
    return any(
        name == it.argval or (isinstance(it.argval, tuple) and name in it.argval) for it in dis.get_instructions(code)
    )
