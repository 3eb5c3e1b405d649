"""validation_step as a Job's evaluate: all validation loaders, and the means of what was logged. The model is a copy,
in eval mode, and ours to use up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from wide.errors import TrainingFailed
from wide.job.model import batch_to
from wide.lightning.data import in_one_process
from wide.lightning.module import Alone, is_metric, metrics_in, transferred


class Values:
    """What was logged, in Lightning's sense: means weigh by the samples of a batch."""

    def __init__(self) -> None:
        self.samples, self.suffix = 1, ""
        self._sums: dict[str, tuple[float, float]] = {}
        self._extremes: dict[str, float] = {}
        self._metrics: dict[str, Any] = {}

    def log(self, name: str, value: Any, options: Mapping[str, Any]) -> None:
        if options.get("on_epoch") is False:
            return
        if options.get("add_dataloader_idx", True):
            name += self.suffix
        for each in (name, f"{name}_epoch") if options.get("on_step") else (name,):
            if is_metric(value):
                self._metrics[each] = value
            else:
                self._add(each, _number(name, value), options)

    def _add(self, name: str, value: float, options: Mapping[str, Any]) -> None:
        how = options.get("reduce_fx", "mean")
        how = how if isinstance(how, str) else getattr(how, "__name__", str(how))
        if how in ("min", "max", "amin", "amax"):
            extreme = min if how.endswith("min") else max
            self._extremes[name] = extreme(self._extremes.get(name, value), value)
        elif how in ("mean", "sum"):
            samples = 1 if how == "sum" else options.get("batch_size") or self.samples
            total, count = self._sums.get(name, (0.0, 0.0))
            self._sums[name] = total + value * samples, 1.0 if how == "sum" else count + samples
        else:
            raise TrainingFailed(f"self.log({name!r}, reduce_fx={how}): mean, sum, min and max are understood")

    def result(self) -> dict[str, float]:
        means = {name: total / count for name, (total, count) in self._sums.items()}
        computed = {name: _number(name, metric.compute()) for name, metric in self._metrics.items()}
        return means | self._extremes | computed


def evaluate(model: Any) -> dict[str, float]:
    values = Values()
    for module in model.modules():
        if isinstance(module, Alone):
            vars(module)["_validation"] = values
    for metric in metrics_in(model):
        metric.reset()
    loaders = model._wide.plan.loaders.validation
    if not loaders:
        return {}
    with torch.no_grad():
        model.on_validation_start()
        model.on_validation_epoch_start()
        for n, loader in enumerate(loaders):
            values.suffix = f"/dataloader_idx_{n}" if len(loaders) > 1 else ""
            _one(model, in_one_process(loader), values, [n] if len(loaders) > 1 else [])
        values.suffix, values.samples = "", 1
        model.on_validation_epoch_end()
        model.on_validation_end()
    return values.result()


def _one(model: Any, loader: Any, values: Values, which: list[int]) -> None:
    takes = model._wide.takes_to_validate
    for i, batch in enumerate(loader):
        batch = transferred(model, batch_to(batch, model.device))
        values.samples = size_of(batch) or 1
        model.on_validation_batch_start(batch, i, *(which or [0]))
        said = model.validation_step(*(batch, i, *which)[:takes])
        model.on_validation_batch_end(said, batch, i, *(which or [0]))


def size_of(batch: Any) -> int | None:
    """How many samples: as the first tensor in it has."""
    if isinstance(batch, torch.Tensor):
        return len(batch) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    elif is_dataclass(batch):
        batch = [getattr(batch, field.name) for field in fields(batch)]
    items = batch if isinstance(batch, list | tuple) else ()
    return next((size for item in items if (size := size_of(item)) is not None), None)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise TrainingFailed(f"self.log({name!r}, …) takes one number, got {kind}: log its parts one by one") from None
