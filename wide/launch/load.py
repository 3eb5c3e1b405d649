"""`wide.load(RUN)`: what a run has come to. Knows checkpoints, run.db and run.json."""

from __future__ import annotations

import functools
import sqlite3
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wide.errors import TrainingFailed, UsageError
from wide.job.definition import Job
from wide.launch import story
from wide.launch.folder import CHECKPOINTS
from wide.store.reading import DATABASE
from wide.telemetry.log import log

if TYPE_CHECKING:
    from wide.store.checkpoint import Checkpoint


@dataclass(frozen=True)
class Run:
    """A run's newest weights, and how it went. `history` has one loss for each step, `metrics` the last evaluation's
    and `evaluations` all of them: (step, {"accuracy": 0.97}).
    """

    run_dir: str
    steps: int
    weights: dict[str, Any]  # the model's state dict
    weights_sha256: str
    history: list[float]
    metrics: dict[str, float]
    evaluations: list[tuple[int, dict[str, float]]]
    job: Job | None = field(default=None, repr=False)

    @functools.cached_property
    def model(self) -> Any:
        """The trained torch.nn.Module, in eval mode. Built by the job; if none was given, by that in the file which the
        run was begun with.
        """
        job = self.job or _job_of(Path(self.run_dir))
        model = job.model()
        model.load_state_dict(self.weights)
        return model.eval()


def load(run: Path | str, job: Job | None = None) -> Run:
    """What is in the newest checkpoint of the run in that folder: .model, .weights, .history, .metrics, …"""
    from wide.store.weights import state_sha256

    folder = Path(run)
    newest = newest_in(folder)
    history, evaluations = _numbers(folder / DATABASE, newest.step)
    return Run(
        run_dir=str(folder),
        steps=newest.step,
        weights=newest.model,
        weights_sha256=state_sha256(newest.model),
        history=history,
        metrics=evaluations[-1][1] if evaluations else {},
        evaluations=evaluations,
        job=job,
    )


def newest_in(folder: Path) -> Checkpoint:
    """What a run has come to, or why there is nothing."""
    from wide.store import checkpoint

    if not (folder / DATABASE).exists():
        raise UsageError(f"{folder}: there is no run in it (no {DATABASE}); give a run's folder, such as runs/…")
    if not checkpoint.is_any(folder / CHECKPOINTS):
        raise TrainingFailed(f"{folder} has no checkpoint yet: its run has only just begun, or never got that far")
    _, newest, problems = checkpoint.newest(folder / CHECKPOINTS)
    for problem in problems:
        log.warning("%s", problem)
    return newest


def _job_of(folder: Path) -> Job:
    """By the file that its story names."""
    from wide.job.loading import load as load_job

    spec = story.spec_of(folder)
    if not spec:
        raise UsageError(
            f"{folder} does not say which file its job is in: give the job, wide.load({str(folder)!r}, job)"
        )
    try:
        return load_job(spec)
    except UsageError as error:
        raise UsageError(f"{error}; or say wide.load({str(folder)!r}, job)") from None


def _numbers(database: Path, steps: int) -> tuple[list[float], list[tuple[int, dict[str, float]]]]:
    """Of the steps that are in the weights."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as db:
        losses = [loss for (loss,) in db.execute("SELECT loss FROM steps WHERE step < ? ORDER BY step", (steps,))]
        found: dict[int, dict[str, float]] = {}
        query = "SELECT step, metric, value FROM evaluations WHERE step <= ? ORDER BY step"
        for step, name, value in db.execute(query, (steps,)):
            found.setdefault(step, {})[name] = float("nan") if value is None else value
    return losses, list(found.items())
