"""evaluate() of a trainer as a job's: when, of what model, and what follows: the best checkpoint, an early end."""

from __future__ import annotations

import math
import numbers
from typing import Any

from torch import nn

from wide.hf.light import Light
from wide.hf.loss import Pace
from wide.hf.models import Model
from wide.job.here import here

OF_THE_CLOCK = ("_runtime", "_per_second", "_preparation_time")  # other numbers in every run


class Evaluate:
    """(model) -> {"eval_loss": …, "eval_accuracy": …}."""

    def __init__(self, trainer: Any, light: Light, model: Model, pace: Pace) -> None:
        self._light, self._model, self._pace = light, model, pace
        self._data, self._collate = trainer.eval_dataset, trainer.data_collator

    def __call__(self, model: nn.Module) -> dict[str, float]:
        trainer = self._light.at(self._model.with_weights_of(model).eval())
        trainer.eval_dataset, trainer.data_collator = self._data, self._collate
        trainer.state.global_step, trainer.state.epoch = here().step, self._pace.epoch(here().step)
        try:
            said = trainer.evaluate()
        except AttributeError as error:
            self._light.explain(error)
            raise
        return {name: float(value) for name, value in said.items() if name != "epoch" and _is_kept(name, value)}


class Patience:
    """EarlyStoppingCallback: has the metric not become better, by more than the threshold, so many times?"""

    def __init__(self, metric: str, is_greater_better: bool, patience: int, threshold: float) -> None:
        self._metric, self._sign = metric, 1 if is_greater_better else -1
        self._patience, self._threshold = patience, threshold

    def __call__(self, evaluations: list[dict[str, float]]) -> bool:
        best, waited = -math.inf, 0
        for said in evaluations:
            value = self._sign * said[self._metric]
            waited = 0 if value - best > self._threshold else waited + 1
            best = max(best, value)
        return waited >= self._patience


def metric_of(args: Any) -> tuple[str, bool] | None:
    """What is compared, as evaluate() calls it, and whether more of it is better."""
    name = args.metric_for_best_model
    if name is None or strategy(args.eval_strategy) == "no":
        return None
    return (name if name.startswith("eval_") else f"eval_{name}"), bool(args.greater_is_better)


def strategy(said: Any) -> str:
    return str(getattr(said, "value", said) or "no")


def every(args: Any, what: str, steps: int) -> int | None:
    """How often in steps, if it is by steps; a part of 1 is that part of the training."""
    said = getattr(args, f"{what}_steps")
    if strategy(getattr(args, f"{what}_strategy")) != "steps" or said is None or said <= 0:
        return None
    return max(1, math.ceil(steps * said) if said < 1 else int(said))


def _is_kept(name: str, value: Any) -> bool:
    return isinstance(value, numbers.Real) and not name.endswith(OF_THE_CLOCK)
