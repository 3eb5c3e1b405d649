"""After training: the trainer has the trained model, and a state as `trainer.train()` would have left it."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from wide.hf.evaluation import every, metric_of, strategy
from wide.hf.loss import Pace
from wide.hf.models import align
from wide.hf.steps import Optimizer, Scheduler, rates

KNOWN = ("step", "epoch", "samples", "loss", "seconds", "at")  # of a row of the run's history
Row = dict[str, Any]


class Finish:
    """Called by wide.run with its result, in the process that has the trainer."""

    def __init__(self, trainer: Any, pace: Pace, optimizer: Optimizer, scheduler: Scheduler) -> None:
        self._trainer, self._pace, self._optimizer, self._scheduler = trainer, pace, optimizer, scheduler

    def __call__(self, result: Any) -> None:
        trainer, history = self._trainer, result.history
        rows: list[Row] = history.to_dict("records") if hasattr(history, "to_dict") else history
        args, state, steps = trainer.args, trainer.state, result.steps
        state.global_step, state.max_steps = steps, self._pace.max_steps
        state.epoch, state.num_train_epochs = self._pace.epoch(steps), math.ceil(result.epochs)
        state.train_batch_size = args.per_device_train_batch_size
        state.log_history = logged(rows, self._pace, _points(args, self._pace, rows), self._rates(steps))
        state.log_history.append(self._last(result, rows, state.epoch))
        best = self._best(result, rows)
        trainer.model.load_state_dict(best if best is not None else result.model.state_dict(), strict=False)
        align(trainer.model, getattr(trainer, "processing_class", None))
        trainer.is_in_train = False

    def _rates(self, steps: int) -> list[float]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return rates(self._optimizer, self._scheduler, self._trainer.model, steps)
            except TypeError:  # a scheduler that waits for a metric
                return []

    def _last(self, result: Any, rows: list[Row], epoch: float) -> Row:
        seconds = max(result.seconds, 1e-9)
        losses = [row["loss"] for row in rows]
        return {
            "train_runtime": round(result.seconds, 4),
            "train_samples_per_second": round(result.samples / seconds, 3),
            "train_steps_per_second": round(result.steps / seconds, 3),
            "train_loss": sum(losses) / max(1, len(losses)),
            "epoch": epoch,
            "step": result.steps,
        }

    def _best(self, result: Any, rows: list[Row]) -> dict[str, Any] | None:
        """What the trainer says of its best model; and that one's weights, if they are wanted."""
        args, state, metric = self._trainer.args, self._trainer.state, metric_of(self._trainer.args)
        if metric is None:
            return None
        name, is_greater_better = metric
        told = [row for row in rows if not math.isnan(row.get(name, math.nan))]
        if told:
            row = (max if is_greater_better else min)(told, key=lambda row: row[name])
            state.best_metric, state.best_global_step = row[name], row["step"]
        folder = Path(result.run_dir) / "checkpoints"
        if not args.load_best_model_at_end or not (folder / "best").is_file():
            return None
        path = folder / (folder / "best").read_text(encoding="utf-8").strip()
        state.best_model_checkpoint = str(path)
        return load_file(path / "model.safetensors")


def logged(rows: list[Row], pace: Pace, points: set[int], rates: list[float]) -> list[Row]:
    """log_history: at these steps the mean loss since the last of them, and what evaluate() said after any step."""
    found: list[Row] = []
    since: list[Row] = []
    for row in rows:
        step = row["step"]
        where = {"epoch": pace.epoch(step), "step": step}
        since.append(row)
        said = {name: value for name, value in row.items() if name not in KNOWN and not math.isnan(value)}
        if step in points:
            names = dict.fromkeys(name for one in since for name in one if name not in KNOWN)
            own = {name: _mean([one.get(name, math.nan) for one in since]) for name in names if not _is_evaluated(name)}
            rate = {"learning_rate": rates[step - 1]} if step <= len(rates) else {}
            found.append({"loss": _mean([one["loss"] for one in since])} | rate | own | where)
            since = []
        if evaluated := {name: value for name, value in said.items() if _is_evaluated(name)}:
            found.append(evaluated | where)
    return found


def _points(args: Any, pace: Pace, rows: list[Row]) -> set[int]:
    """The steps after which the trainer would have logged."""
    how, steps = strategy(args.logging_strategy), [row["step"] for row in rows]
    first = {1} if args.logging_first_step and how != "no" else set()
    if how == "epoch":
        return first | {step for step in steps if pace.steps and step % pace.steps == 0} | set(steps[-1:])
    often = every(args, "logging", pace.max_steps)
    return first | {step for step in steps if often is not None and step % often == 0}


def _is_evaluated(name: str) -> bool:
    return name.startswith("eval_")


def _mean(values: list[float]) -> float:
    there = [value for value in values if not math.isnan(value)]
    return sum(there) / len(there) if there else math.nan
