"""`wide.lightning.job(module, data)`: from a Lightning program to a Job."""

from __future__ import annotations

from typing import Any

from wide.errors import UsageError
from wide.job.definition import Job
from wide.job.loading import users_code
from wide.lightning import data as loading
from wide.lightning import refuse, steps, validation
from wide.lightning.checkpoint import Finish
from wide.lightning.module import copied
from wide.lightning.optimizers import scheduler_of
from wide.lightning.program import Program


def job(module: Any, data: Any = None, **fields: Any) -> Job:
    """What `Trainer(…).fit(module, data)` would train, as a Job: `wide.run(wide.lightning.job(module, dm, epochs=3))`.

    `data` is a LightningDataModule, a DataLoader for training, or nothing if the module has loaders of its own.
    `fields` are a Job's: epochs, steps, clip_norm, batches_per_step (accumulate_grad_batches), seed, threads, workers,
    evaluate_every, best, stop_when, … When wide.run is over, `module` has the trained weights, and the run's folder a
    model.ckpt.
    """
    base = refuse.base_of(module)
    refuse.check(module, base)
    refuse.check_fields(fields)
    loading.check(data)
    refuse.check_data(data)
    _check_source(module, data)
    program = Program(copied(module), base, data, fields)
    with loading.as_if_nothing_was_drawn():
        _prepare(program)
        with users_code("configure_optimizers() failed"):
            form = program.form(program.model())
    has_validation = refuse.overrides(module, base, "validation_step") and loading.has(module, data, "val_dataloader")
    return Job(
        model=program.model,
        dataset=program.dataset,
        loss=steps.loss,
        optimizer=program.optimizer,
        scheduler=scheduler_of(form),
        evaluate=validation.evaluate if has_validation else None,
        finish=Finish(module, None if data is None or loading.is_loader(data) else data),
        **fields,
    )


def _check_source(module: Any, data: Any) -> None:
    if loading.is_loader(data) or loading.has(module, data, "train_dataloader"):
        return
    where = type(module).__name__ if data is None else f"{type(data).__name__}, and {type(module).__name__},"
    raise UsageError(f"{where} has no train_dataloader(): wide.lightning.job(module, data) needs a DataLoader")


def _prepare(program: Program) -> None:
    """What Lightning does once on each machine: downloads, mostly."""
    for owner in (program.module, None if loading.is_loader(program.data) else program.data):
        if owner is not None and refuse.overrides(owner, loading.base_of(owner), "prepare_data"):
            with users_code("prepare_data() failed"):
                owner.prepare_data()
