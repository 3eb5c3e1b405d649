"""How long to train: what was asked for, else what the job says. Knows options and schedules."""

from __future__ import annotations

from wide.config import Options
from wide.job.definition import Job
from wide.job.schedule import Schedule


def wanted(options: Options, job: Job) -> tuple[int | None, float | None]:
    """Steps and epochs. --steps or --epochs replace what the job says."""
    if options.only_plans:
        return None, None
    steps, epochs = options.steps, options.epochs
    if steps is None and epochs is None:
        steps, epochs = job.steps, job.epochs
    has_end = options.seconds is not None or (job.own_loop is not None and job.own_loop.every > 0)
    if steps is None and epochs is None and not has_end:
        epochs = 1
    return steps, epochs


def length(options: Options, job: Job, schedule: Schedule) -> int | None:
    """In steps. --seconds is a limit on top of it."""
    steps, epochs = wanted(options, job)
    limits = [steps] if steps is not None else []
    limits += [schedule.steps_for(epochs)] if epochs is not None else []
    return min(limits) if limits else None
