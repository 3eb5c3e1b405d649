"""What stands where Lightning's Trainer would: `self.trainer` answers where the run is and how long it will be, and
says by name what nobody here can answer.
"""

from __future__ import annotations

from typing import Any, Protocol

from wide.errors import TrainingFailed
from wide.job.here import Here, here


class Unanswered(TrainingFailed, AttributeError):
    """An attribute too, so that hasattr() and getattr() with a default work."""


class Plan(Protocol):
    """What is known of the run."""

    epochs: float | None
    steps: int | None
    batches_per_step: int | None
    clip_norm: float | None

    @property
    def datamodule(self) -> Any: ...
    @property
    def batches(self) -> int | None: ...  # of an epoch
    @property
    def steps_per_epoch(self) -> int | None: ...
    @property
    def loaders(self) -> Any: ...
    @property
    def estimated_steps(self) -> int: ...


def place() -> Here:
    """Where the run is; before it begins, where it will."""
    try:
        return here()
    except TrainingFailed:
        return Here(0)


class StandIn:
    """In the place of a Trainer."""

    is_global_zero = True
    world_size = num_devices = num_nodes = 1
    global_rank = local_rank = node_rank = 0
    testing = predicting = sanity_checking = fast_dev_run = False
    logger = None

    def __init__(self, plan: Plan, is_validating: bool) -> None:
        self._plan, self.validating, self.training = plan, is_validating, not is_validating

    @property
    def loggers(self) -> list[Any]:
        return []

    @property
    def global_step(self) -> int:
        return place().step

    @property
    def current_epoch(self) -> int:
        return place().epoch

    @property
    def max_epochs(self) -> int:
        return -1 if self._plan.epochs is None else int(self._plan.epochs)

    @property
    def max_steps(self) -> int:
        return -1 if self._plan.steps is None else self._plan.steps

    @property
    def accumulate_grad_batches(self) -> int:
        return self._plan.batches_per_step or 1

    @property
    def gradient_clip_val(self) -> float | None:
        return self._plan.clip_norm

    @property
    def datamodule(self) -> Any:
        return self._plan.datamodule

    @property
    def num_training_batches(self) -> float:
        batches = self._plan.batches
        return float("inf") if batches is None else batches

    @property
    def estimated_stepping_batches(self) -> int:
        return self._plan.estimated_steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise Unanswered(f"self.trainer.{name}: a pool has no such thing; see docs/your-loop.md for what it answers")
