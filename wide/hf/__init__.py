"""`wide.hf.job(trainer)`: what a transformers.Trainer would train, as a Job. Loads nothing by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wide.job.definition import Job

__all__ = ["job"]


def job(trainer: Any) -> Job:
    """What `trainer.train()` would train, as a job: `wide.run(wide.hf.job(trainer), nodes=3)`. Afterwards the trainer
    has the trained model and the history, so that `trainer.save_model()` and `trainer.evaluate()` go on from there.
    """
    from wide.hf.making import made  # torch and accelerate come with the trainer

    return made(trainer)
