"""`wide.load(RUN)`: what a run has come to. Knows checkpoints, run.db and run.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wide.dashboard.account import account
from wide.errors import TrainingFailed, UsageError
from wide.job.definition import Job
from wide.job.spec import TOLD, Given
from wide.job.values import Function
from wide.launch import story
from wide.launch.folder import CHECKPOINTS
from wide.launch.result import Result
from wide.store.reading import DATABASE, Reading
from wide.telemetry.log import log

if TYPE_CHECKING:
    from wide.store.checkpoint import Checkpoint


@dataclass(frozen=True)
class Run(Result):
    """A run's newest weights, and how it went until then. `weights` is the model's state dict, `evaluations` all that
    evaluate() said: (step, {"accuracy": 0.97}). `model` is in eval mode.
    """

    weights: dict[str, Any] = field(default_factory=dict, repr=False)
    evaluations: list[tuple[int, dict[str, float]]] = field(default_factory=list, repr=False)


def load(run: Path | str, job: Job | Function | None = None) -> Run:
    """What is in the newest checkpoint of the run in that folder, which may still go on: .model, .weights, .history,
    .plot(), .metrics, … The model is built by the job (a function is called with the run's values); if none is given,
    by that in the file which the run began with.
    """
    from wide.store.weights import state_sha256

    folder = Path(run)
    newest = newest_in(folder)
    told, evaluations = account(folder), _evaluations(folder, newest.step)
    seconds, batches = newest.state.get("seconds", 0.0), newest.state.get("batches", 0)
    samples = newest.state.get("samples", 0)

    def build() -> Any:
        model = (_job_of(folder) if job is None else _given(job, folder)).model()
        model.load_state_dict(newest.model)
        return model.eval()

    return Run(
        run_dir=str(folder),
        strategy=told.brief.strategy,
        steps=newest.step,
        epochs=newest.state.get("epochs", 0.0),
        batches=batches,
        samples=samples,
        seconds=seconds,
        batches_per_s=batches / max(seconds, 1e-9),
        samples_per_s=samples / max(seconds, 1e-9),
        loss_first=told.loss_first,
        loss_last=told.loss_last,
        weights_sha256=state_sha256(newest.model),
        metrics=dict(evaluations[-1][1]) if evaluations else {},
        nodes=[node.totals for node in told.nodes],
        set=story.set_of(folder),
        build=build,
        weights=newest.model,
        evaluations=evaluations,
    )


def newest_in(folder: Path, is_best: bool = False) -> Checkpoint:
    """What a run has come to, or its best checkpoint; or why there is nothing."""
    from wide.store import checkpoint

    if not (folder / DATABASE).exists():
        raise UsageError(f"{folder}: there is no run in it (no {DATABASE}); give a run's folder, such as runs/…")
    if not checkpoint.is_any(folder / CHECKPOINTS):
        raise TrainingFailed(f"{folder} has no checkpoint yet: its run has only just begun, or never got that far")
    if is_best:
        if (path := checkpoint.best(folder / CHECKPOINTS)) is None:
            raise UsageError(f"{folder} has no best checkpoint: its job names no metric, as in Job(best='accuracy')")
        try:
            return checkpoint.read(path)
        except checkpoint.Broken as error:
            raise TrainingFailed(f"{path} cannot be used: {error}") from None
    _, newest, problems = checkpoint.newest(folder / CHECKPOINTS)
    for problem in problems:
        log.warning("%s", problem)
    return newest


def _given(job: Job | Function, folder: Path) -> Job:
    if isinstance(job, Job):
        return job
    from wide.job.loading import make

    values = {name: Given(value, TOLD) for name, value in story.set_of(folder).items()}
    return make(job, values)[0]


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


def _evaluations(folder: Path, steps: int) -> list[tuple[int, dict[str, float]]]:
    """Of the steps that are in the weights."""
    found: dict[int, dict[str, float]] = {}
    query = "SELECT step, metric, value FROM evaluations WHERE step <= ? ORDER BY step"
    with Reading(folder) as run:
        for step, name, value in run.rows("evaluations", query, steps):
            found.setdefault(step, {})[name] = float("nan") if value is None else value
    return list(found.items())
