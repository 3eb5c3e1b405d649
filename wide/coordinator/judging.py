"""What follows from evaluations: early stopping, the best checkpoint, a scheduler that waits for a metric. Knows the
job's wishes and its optimizer; knows no pool, which waits meanwhile (state.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent
from wide.job.loading import users_code

Metrics = dict[str, float]


class Evaluation(NamedTuple):
    """What is known of the model after so many steps."""

    steps: int
    metrics: Metrics


class Verdict(NamedTuple):
    why_stop: str = ""  # empty: it goes on
    is_best: bool = False


class Judge:
    """Remembers all evaluations; `before` are those of a run that goes on."""

    def __init__(self, job: Job, descent: Descent, before: Mapping[str, Any] | None = None) -> None:
        self._stop_when, self._descent, self.goes_by = job.stop_when, descent, job.goes_by
        self._best, self._sign = (job.best or "").lstrip("-"), -1 if (job.best or "").startswith("-") else 1
        self.wants_metrics = job.evaluate is not None
        self.keeps_best = job.best is not None
        told = before["evaluations"] if before else ()
        self._evaluations = [Evaluation(steps, {n: float(v) for n, v in said.items()}) for steps, said in told]
        self._best_value = float(before["best"]) if before else -math.inf

    @property
    def steps(self) -> int:
        """After which the last verdict was given."""
        return self._evaluations[-1].steps if self._evaluations else 0

    def state(self) -> dict[str, Any]:
        """Numbers as text, in which a NaN is one."""
        told = [(steps, {name: repr(value) for name, value in said.items()}) for steps, said in self._evaluations]
        return {"evaluations": told, "best": repr(self._best_value)}

    def hear(self, steps: int, epoch: int, metrics: Metrics, is_last: bool) -> Verdict:
        """`is_last`: only because the run ends here. Were it longer, training would not know of this one."""
        said = {"step": float(steps), "epoch": float(epoch)} | metrics
        is_best = self._best != "" and self._is_best(_named(self._best, said, "Job(best=…)"))
        if is_last:
            return Verdict(is_best=is_best)
        if self._stop_when is None:
            self._evaluations.clear()  # nobody will ask for them
        self._evaluations.append(Evaluation(steps, said))
        if self._descent.metric:
            self._descent.judge(_named(self._descent.metric, said, "wide.on_metric"))
        return Verdict(self.why_stop(), is_best)

    def why_stop(self) -> str:
        """After all that was heard; empty, if it goes on."""
        if self._stop_when is None or not self._evaluations:
            return ""
        with users_code("stop_when failed"):
            is_enough = bool(self._stop_when([dict(it.metrics) for it in self._evaluations]))
        return f"stop_when said so after step {self.steps}" if is_enough else ""

    def _is_best(self, value: float) -> bool:
        if not self._sign * value > self._best_value:  # a NaN is not
            return False
        self._best_value = self._sign * value
        return True


def _named(name: str, said: Metrics, whose: str) -> float:
    if name not in said:
        raise TrainingFailed(f"{whose}: there is no metric {name!r}; there are {', '.join(sorted(said))}")
    return said[name]
