"""`--track wandb|trackio|mlflow`: a run's numbers, where people already look. A process of its own, which reads run.db
and knows nothing else of the run: it cannot slow, hang or end training, and ends when the run does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from wide.errors import UsageError
from wide.store.lock import is_held
from wide.store.reading import Reading
from wide.store.sessions import sessions
from wide.telemetry.log import log

LOG = "track.log"
EVERY_S = 2.0
GRACE_S = 20.0  # for what is still to be sent when the run is over
RUNNING = "running"


class Point(NamedTuple):
    """Numbers that belong to one step."""

    step: int
    values: dict[str, float]


class Tracker(Protocol):
    """What is needed of each of these libraries."""

    def log(self, point: Point) -> None: ...
    def finish(self) -> None: ...


@contextlib.contextmanager
def tracking(name: str | None, folder: Path) -> Iterator[None]:
    """Track the run in this folder while the block runs, and a little longer, but never for long."""
    if name is None:
        yield
        return
    command = [sys.executable, "-m", "wide.launch.track", name, str(folder), str(GRACE_S)]
    with (
        open(folder / LOG, "ab") as words,
        subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, start_new_session=True
        ) as process,
    ):
        log.info("tracked by %s; what it says is in %s", name, folder / LOG)
        watching = threading.Thread(target=_tell_failure, args=(process, name, folder), daemon=True)
        watching.start()
        try:
            yield
        finally:
            _end(process)
            watching.join()


def check(name: str | None) -> None:
    """Before anything else: is that library there?"""
    if name is not None and importlib.util.find_spec(name) is None:
        raise UsageError(f"--track {name}: the package {name} is not installed here: pip install {name}")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(GRACE_S + 2 * EVERY_S)
    except subprocess.TimeoutExpired:
        process.kill()


def _tell_failure(process: subprocess.Popen[bytes], name: str, folder: Path) -> None:
    """As soon as it happens, which may be long before the run is over."""
    if process.wait():
        log.warning("%s has failed, and not all is tracked: %s says why", name, folder / LOG)


# ── the process ──────────────────────────────────────────────────────────────────────────────────────────────────────


def main(name: str, folder: Path, grace_s: float) -> None:
    """Another thread speaks to the library, so that this one can end it, whatever it waits for."""
    problem: list[BaseException] = []
    thread = threading.Thread(target=_track, args=(name, folder, problem), daemon=True)
    thread.start()
    while thread.is_alive() and not _is_over(folder):
        thread.join(EVERY_S)
    thread.join(grace_s)
    if thread.is_alive():
        print(f"{name} did not finish within {grace_s:g} s after the run, and was ended", flush=True)
    os._exit(1 if problem or thread.is_alive() else 0)


def _track(name: str, folder: Path, problem: list[BaseException]) -> None:
    try:
        tracker = TRACKERS[name](folder)
        with Reading(folder) as run:
            points = Points(run, _since(folder))
            while True:
                is_over = _is_over(folder)
                for point in points.new():
                    tracker.log(point)
                if is_over:
                    break
                time.sleep(EVERY_S)
        tracker.finish()
    except BaseException as error:
        problem.append(error)
        raise


def _is_over(folder: Path) -> bool:
    told = sessions(folder)
    return (bool(told) and told[-1].get("state") != RUNNING) or not is_held(folder)


def _since(folder: Path) -> float:
    """A run that goes on was tracked before: from now on only."""
    told = sessions(folder)
    return float(told[-1].get("began_at", 0.0)) if len(told) > 1 else 0.0


class Points:
    """What has come since the last look, and since that moment. Losses of quick steps become one point a second, their
    mean; evaluations come when they are done, at the step that they are about.
    """

    def __init__(self, run: Reading, since: float = 0.0) -> None:
        self._run = run
        self._since = since
        self._step, self._evaluation = -1, 0

    def new(self) -> list[Point]:
        found: dict[int, dict[str, float]] = {}
        for step, loss in self._losses():
            found.setdefault(step, {})["loss"] = loss
        query = "SELECT rowid, step, metric, value FROM evaluations WHERE rowid > ? AND at >= ? ORDER BY rowid"
        for row, step, metric, value in self._run.rows("evaluations", query, self._evaluation, self._since):
            self._evaluation = row
            if value is not None:
                found.setdefault(step, {})[f"evaluate/{metric}"] = value
        return [Point(step, found[step]) for step in sorted(found)]

    def _losses(self) -> list[tuple[int, float]]:
        query = "SELECT step, loss, merged_at FROM steps WHERE step > ? AND merged_at >= ? ORDER BY step"
        seconds: dict[int, list[tuple[int, float]]] = {}
        for step, loss, at in self._run.rows("steps", query, self._step, self._since):
            self._step = step
            if loss is not None:
                seconds.setdefault(int(at), []).append((step + 1, loss))
        return [(many[-1][0], sum(loss for _, loss in many) / len(many)) for many in seconds.values()]


class Wandb:
    def __init__(self, folder: Path) -> None:
        import wandb

        project = None if os.environ.get("WANDB_PROJECT") else _project(folder)
        name = folder.resolve().name
        given = {"project": project, "name": name, "id": name, "resume": "allow"}  # should the run go on, so does this
        self._run = wandb.init(**given, dir=str(folder), config=_config(folder))
        self._run.define_metric("*", step_metric="step")  # its own steps may not go back

    def log(self, point: Point) -> None:
        self._run.log(point.values | {"step": point.step})

    def finish(self) -> None:
        self._run.finish()


class Trackio:
    def __init__(self, folder: Path) -> None:
        import trackio

        self._trackio = trackio
        trackio.init(project=_project(folder), name=folder.resolve().name, config=_config(folder))

    def log(self, point: Point) -> None:
        self._trackio.log(point.values, step=point.step)

    def finish(self) -> None:
        self._trackio.finish()


class Mlflow:
    def __init__(self, folder: Path) -> None:
        import mlflow

        self._mlflow = mlflow
        mlflow.set_experiment(_project(folder))
        mlflow.start_run(run_name=folder.resolve().name)
        mlflow.log_params(_config(folder))

    def log(self, point: Point) -> None:
        self._mlflow.log_metrics(point.values, step=point.step)

    def finish(self) -> None:
        self._mlflow.end_run()


TRACKERS: dict[str, Any] = {"wandb": Wandb, "trackio": Trackio, "mlflow": Mlflow}


def _project(folder: Path) -> str:
    """The job's name."""
    job = next((session["job"] for session in reversed(sessions(folder)) if session.get("job")), None)
    return Path(job["file"]).stem if job else "wide"


def _config(folder: Path) -> dict[str, Any]:
    told = sessions(folder)
    options: dict[str, Any] = {**told[0].get("options", {}), **told[0].get("set", {})} if told else {}
    return {name: value for name, value in options.items() if value is not None}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), float(sys.argv[3]))
