"""The model that is being trained: the one true copy of its weights, and its optimizer. Knows no sockets, no time.

How updates become a version is the strategy's fold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind, join, scale, settle
from wide.codec.memory import Allocate
from wide.codec.spare import Spare
from wide.coordinator.resting import Resting
from wide.errors import ParametersMoved, TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent
from wide.job.model import check_aliases


class Master:
    """The weights, and what is done to them. `moved`: parameters that the loss moves, and whether they are trained; and
    large buffers that it changes.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        seed: int,
        moved: Mapping[str, bool] = MappingProxyType({}),
        allocate: Allocate | None = None,
    ) -> None:
        self.model = model.cpu()
        check_aliases(model, job.loss)
        self.layout = Layout(model, moved)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(moved.get(name, parameter.requires_grad))
        if not self.layout.trainable:
            raise TrainingFailed("the model has no trainable parameter: nothing to do")
        memory = allocate(self.layout.nbytes) if allocate is not None else None
        self.weights = Flat(self.layout, only_live=False, memory=memory)
        bind(model, self.weights, self.layout)
        self.descent = Descent(job, model, [slot.name for slot in self.layout.trainable], seed)
        by_name = dict(model.named_parameters())
        self._resting = Resting(model, self.layout, self.weights)
        self._all = [by_name[slot.name] for slot in (*self.layout.trainable, *self.layout.frozen)]
        self._flags = [parameter.requires_grad for parameter in self._all]
        self.spare = Spare(self.layout, allocate=allocate)
        self.release = self.spare.give
        self._owed: Flat | None = None

    @property
    def trainable(self) -> Sequence[torch.Tensor]:
        return self.weights.trainable

    @property
    def named_views(self) -> list[tuple[str, torch.Tensor]]:
        """All tensors of the model by their names, as views into the weights."""
        layout, weights = self.layout, self.weights
        slots = [*layout.trainable, *layout.averaged, *layout.kept, *layout.frozen, *layout.constant]
        views = [*weights.trainable, *weights.averaged, *weights.kept, *weights.frozen, *weights.constant]
        return [(slot.name, view) for slot, view in zip(slots, views, strict=True)]

    @property
    def moved(self) -> dict[str, bool]:
        """The parameters that the loss moves, and whether they are trained now."""
        flags = self.weights.requires_grad
        names = [self.layout.trainable[i].name for i in self.layout.moved]
        return {} if flags is None else dict(zip(names, flags.tolist(), strict=True))

    @property
    def moves(self) -> dict[str, bool]:
        """The same, and the buffers that were taken for constant, and are not."""
        return self.moved | dict.fromkeys(self.layout.moved_buffers, False)

    def join(self, left: Flat, right: Flat) -> Flat:
        join(left, right)
        self.spare.give(right)
        return left

    def scale(self, update: Flat, factor: float) -> None:
        scale(update, factor)

    def owe(self, debt: Flat, weight: float) -> None:
        """What a codec had left out of earlier updates, from a node that is leaving: part of the next version."""
        scale(debt, weight)
        debt.touched = sum(1 << i for i, owed in enumerate(debt.trainable) if owed.any())
        self._owed = debt if self._owed is None else self.join(self._owed, debt)

    def forget_debts(self) -> None:
        if self._owed is not None:
            self.spare.give(self._owed)
            self._owed = None

    def with_debts(self, total: Flat) -> Flat:
        """A version's update, and what those owed who have left."""
        if self._owed is not None:
            self.join(total, self._owed)
            self._owed = None
        return total

    def descend(self, total: Flat, steps: int) -> None:
        """One step of the job's optimizer along this gradient, the `steps`-th."""
        self.descent.advance(steps - 1)  # if others made steps meanwhile
        settle(self.weights, total)
        self.move_buffers(total)
        if self.descent.is_bare:
            self.descent.step(total.trainable, total.touched, steps - 1)
            return
        is_torchs = self.descent.is_torchs
        self._resting.look(is_torchs)
        self.descent.step(total.trainable, total.touched, steps - 1)
        self.descent.advance(steps)
        self._see_what_moved(self._resting.moved(is_torchs))

    def _see_what_moved(self, moved: list[str]) -> None:
        """An optimizer may move a teacher along, a scheduler may freeze layers or unfreeze them: nodes must know."""
        flags = [parameter.requires_grad for parameter in self._all]
        if flags == self._flags and not moved:
            return
        known, self._flags = {self.layout.trainable[i].name for i in self.layout.moved}, flags
        frozen = {slot.name for slot in self.layout.frozen}
        names = [slot.name for slot in (*self.layout.trainable, *self.layout.frozen)]
        is_trained = dict(zip(names, flags, strict=True))
        if self.weights.requires_grad is not None:
            now = [is_trained[self.layout.trainable[i].name] for i in self.layout.moved]
            self.weights.requires_grad.copy_(torch.tensor(now))
        moved += [name for name in names if name not in known and is_trained[name] == (name in frozen)]
        if moved:
            raise ParametersMoved(list(dict.fromkeys(moved)))

    def move_buffers(self, total: Flat) -> None:
        if not len(total.buffers_raw):
            return
        with torch.no_grad():
            for run, change in zip(self.weights.averaged_runs, total.averaged_runs, strict=True):
                run.add_(change)
            self.weights.kept_raw.copy_(total.kept_raw)
        if total.moved:
            for i, is_trained in zip(total.moved, self.moved.values(), strict=True):
                self.descent.parameters[i].requires_grad_(is_trained)
