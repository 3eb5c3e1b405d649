"""What after_step changes besides the model's tensors. It runs in one process, and the losses in others: what it leaves
in a global, a closure or an attribute, they never see. Knows the job's functions; runs none of them.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from wide.errors import TrainingFailed
from wide.job.definition import Job
from wide.job.picture import picture
from wide.job.reach import Found, Place, line_of, namespaces, reach

FIRST = 4  # calls that are looked at; then those whose number is a power of two


class Outside:
    """`look` before after_step is called, `check` afterwards."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        losses = [phase.loss for phase in job.turns]
        self._theirs = {"model": model, "loss": losses, "dataset": job.dataset, "collate": job.collate}
        self._own, self._bound, self._model = {"after_step": job.after_step}, namespaces(model), model
        self._calls, self._is_due = 0, False
        self._before: list[tuple[Found, dict[Any, Any]]] = []
        self._modes: list[bool] = []

    def look(self) -> None:
        self._calls += 1
        self._is_due = self._calls <= FIRST or self._calls & (self._calls - 1) == 0
        self._modes = [module.training for module in self._model.modules()]
        if self._is_due:
            found = [reach(self._bound, **self._theirs), reach(self._bound, **self._own)]
            self._before = [(one, {place.identity: _seen(place) for place in one.places}) for one in found]

    def check(self) -> str:
        """What it keeps for itself, if anything. Raises for what others would have to see."""
        if self._modes != [module.training for module in self._model.modules()]:
            raise TrainingFailed("after_step switches the model between train() and eval(), which nodes do not see")
        if not self._is_due:
            return ""
        theirs, own = (_changed(*one) for one in self._before)
        if theirs:
            raise TrainingFailed(
                f"after_step changes {theirs}, which the losses on the nodes do not see: keep it in a buffer of the "
                "model (register_buffer), or derive it from wide.here()"
            )
        return own


def _seen(place: Place) -> Any:
    try:
        return picture(place.get())
    except Exception:  # gone meanwhile
        return None


def _changed(found: Found, before: dict[Any, Any]) -> str:
    for place in found.places:
        if _seen(place) != before[place.identity]:
            line = line_of(place, found)
            return f"{place.name} ({line})" if line else place.name
    return ""
