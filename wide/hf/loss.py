"""compute_loss() of a trainer as a job's loss. Is it a sum over what the whole step counts (label tokens), or a mean of
its batch? That is tried, on a copy, when the job is made.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from wide.errors import TrainingFailed, UsageError
from wide.hf.light import Light
from wide.job.definition import total
from wide.job.here import Here, here

MOST_TRIED = 8  # batches, until one has labels
FOURTH = 4  # a power of two: dividing by it loses no bit, so sums and means tell themselves apart exactly
ALL_BUT_NONE = 2**40  # of a sum that is divided by this nothing is left: what remains is a term beside it
CLOSE, NEXT_TO_NOTHING = 1e-3, 1e-5
PLACE = ("step", "epoch", "loss", "learning_rate", "grad_norm")  # which log() adds, and what the trainer says itself


class Pace(NamedTuple):
    """How an epoch is cut: for what a trainer tells its own methods about where it is. 0: that is not known."""

    steps: int
    batches: int
    batches_per_step: int
    max_steps: int

    def epoch(self, steps: int) -> float:
        """As in trainer.state, after so many steps."""
        whole, within = divmod(steps, self.steps) if self.steps else (0, steps)
        return whole + min(within * self.batches_per_step, self.batches) / self.batches if self.batches else 0.0

    def in_step(self, step: int) -> int:
        """How many batches this step has."""
        is_last = self.steps and step % self.steps == self.steps - 1
        return self.batches - (self.steps - 1) * self.batches_per_step if is_last else self.batches_per_step


class Elsewhere:
    """What compute_loss() cannot ask: the coordinator has it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # a copy asks for these
            raise AttributeError(name)
        raise TrainingFailed(
            f"compute_loss uses self.{vars(self)['_name']}, which nodes do not have: derive it from "
            "self.state.global_step, or leave it out"
        )


class Loss:
    """Called on nodes. `is_sum`: it is over what the trainer counts; else a mean of the batch, as it comes."""

    def __init__(self, light: Light, pace: Pace) -> None:
        self._light, self._pace, self.is_sum = light, pace, False
        self.trainer: Any = None  # of the model that was there last
        self._of: Any = None

    def __call__(self, model: nn.Module, batch: Any) -> Any:
        trainer, where = self._trainer_of(model), here()
        self._tell(trainer, where)
        one = torch.ones_like(count) if (count := counted(trainer, batch)) is not None else None
        loss = self._computed(trainer, batch, one if self.is_sum else count)
        logged = _collected(trainer)
        return total(loss, count if self.is_sum else 1), logged

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"trainer": None, "_of": None}

    def prepare(self, model: nn.Module) -> Any:
        """The trainer is there before anybody looks at what the loss keeps."""
        self._of, self.trainer = weakref.ref(model), self._light.at(model)
        self.trainer.optimizer, self.trainer.lr_scheduler = Elsewhere("optimizer"), Elsewhere("lr_scheduler")
        self._tell(self.trainer, Here(0))
        return self.trainer

    def _trainer_of(self, model: nn.Module) -> Any:
        if self._of is None or self._of() is not model:
            self.prepare(model)
        return self.trainer

    def _tell(self, trainer: Any, where: Here) -> None:
        """What compute_loss() may ask: for a weight that follows the epoch, say."""
        trainer.state.global_step, trainer.state.max_steps = where.step, self._pace.max_steps
        trainer.state.epoch = self._pace.epoch(where.step)
        trainer.current_gradient_accumulation_steps = self._pace.in_step(where.step)

    def _computed(self, trainer: Any, batch: Any, count: Any) -> Any:
        try:
            inputs = trainer._prepare_inputs(copy.copy(batch))  # trainers take labels out of it
            return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=count)
        except AttributeError as error:
            self._light.explain(error)
            raise

    # ── what kind of loss it is ──────────────────────────────────────────────────────────────────────────────────

    def find_out(self, model: nn.Module, batches: Iterable[Any]) -> None:
        """By what another count makes of it. Raises what is neither a sum nor a mean."""
        trainer = self.prepare(model.eval())
        name = f"{type(trainer).__name__}.compute_loss"
        for batch, _ in zip(batches, range(MOST_TRIED), strict=False):
            count = counted(trainer, batch)
            if count is None:
                self._computed(trainer, batch, None)  # it may fail, better here than on a node
                break
            with torch.random.fork_rng(devices=[]):
                tried = [torch.full_like(count, n) for n in (1, FOURTH, ALL_BUT_NONE)]
                once, fourth, rest, usual = (self._value(trainer, batch, n) for n in (*tried, count))
            if not count or not once:
                continue  # no label in it tells anything
            if _close(once, FOURTH * fourth) and abs(rest) <= NEXT_TO_NOTHING * abs(usual):
                self.is_sum = True
            elif not _close(once, fourth) and self._pace.batches_per_step > 1:
                raise UsageError(
                    f"wide.hf.job: {name} is neither a sum over num_items_in_batch nor a mean of its batch ({once:.4g} "
                    f"for one item, {fourth:.4g} for {FOURTH}, {rest:.4g} for very many): divide all of it by "
                    "num_items_in_batch, or nothing; or take gradient_accumulation_steps=1"
                )
            break
        else:
            raise UsageError("wide.hf.job: there is no label in the first batches of train_dataset: all are -100")
        self._warn(trainer, name, has_count=count is not None)
        self._of = self.trainer = None

    def _value(self, trainer: Any, batch: Any, count: Any) -> float:
        torch.manual_seed(0)
        value = float(self._computed(trainer, batch, count).detach())
        _collected(trainer)
        return value

    def _warn(self, trainer: Any, name: str, has_count: bool) -> None:
        """Where train() itself does something else with several batches to a step, that few people mean."""
        is_said = getattr(trainer, "loss_is_scaled_for_ga", None)
        accepts = getattr(trainer, "model_accepts_loss_kwargs", False) and has_count
        is_added = (
            is_said if is_said is not None else accepts or getattr(trainer, "compute_loss_func", None) is not None
        )
        steps = self._pace.batches_per_step
        if steps > 1 and bool(is_added) != self.is_sum:
            does = f"divides it by {steps} again" if self.is_sum else f"adds up {steps} of them without dividing"
            kind = "a sum over the step's items" if self.is_sum else "a mean of its batch"
            warnings.warn(f"wide.hf: {name} is {kind}; trainer.train() {does}, a pool takes the mean", stacklevel=5)


def counted(trainer: Any, batch: Any) -> Any:
    """What the trainer counts in this batch, as a tensor; None, if it does not."""
    labels = batch.get("labels") if hasattr(batch, "get") else None
    count = trainer._get_num_items_in_batch([batch], getattr(labels, "device", torch.device("cpu")))
    return torch.as_tensor(count) if count is not None else None


def _collected(trainer: Any) -> dict[str, float]:
    """What was given to self.log(), and what TRL's trainers note of every batch: these are the job's metrics, and the
    notes are empty again.
    """
    found: dict[str, float] = {}
    for entry in trainer.state.log_history:
        found |= {name: float(said) for name, said in entry.items() if name not in PLACE and _is_number(said)}
    trainer.state.log_history.clear()
    notes = getattr(trainer, "_metrics", None)
    if not isinstance(notes, dict):
        return found
    for mode in notes.values():
        if isinstance(mode, dict):
            found |= {name: sum(said) / len(said) for name, said in mode.items() if said and name != "num_tokens"}
            mode.clear()
    if hasattr(trainer, "_total_train_tokens"):
        trainer._total_train_tokens = 0
    return found


def _is_number(said: Any) -> bool:
    return isinstance(said, int | float) and not isinstance(said, bool)


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= CLOSE * max(abs(one), abs(other))
