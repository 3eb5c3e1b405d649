"""The model that is being trained: the one true copy of its weights, and its optimizer. Knows no sockets, no time.

How updates become a version is the strategy's fold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import nn

from wide.codec.layout import Flat, Layout, bind, bring_home, by_counts, join, scale, settle
from wide.codec.memory import Allocate
from wide.codec.spare import Spare
from wide.coordinator.resting import Resting
from wide.errors import ParametersMoved, TrainingFailed
from wide.job.definition import Job
from wide.job.descent import Descent
from wide.job.hands import ONE, Hands
from wide.job.here import Here, Logged, enter
from wide.job.loading import users_code
from wide.job.model import check_aliases
from wide.job.outside import Outside
from wide.job.seeding import generators, mix, seed_everything
from wide.telemetry.log import log


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
        here: Callable[[int], Here] = Here,
        hands: Hands = ONE,
    ) -> None:
        self.model = model.cpu()
        self._after_step, self._here, self._seed = job.after_step, here, seed
        self.logged: Logged = {}  # by the batches of the last version
        check_aliases(model, [phase.loss for phase in job.turns])
        self.layout = Layout(model, moved)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(moved.get(name, parameter.requires_grad))
        if not self.layout.trainable:
            raise TrainingFailed("the model has no trainable parameter: nothing to do")
        memory = allocate(self.layout.nbytes) if allocate is not None else None
        self.weights = Flat(self.layout, only_live=False, memory=memory)
        bind(model, self.weights, self.layout)
        self.descent = Descent(job, model, [slot.name for slot in self.layout.trainable], seed)
        if not self.layout.moved:
            self.descent.use_runs(self.layout.places, self.weights.trainable_runs, hands)
        by_name = dict(model.named_parameters())
        self._resting = Resting(model, self.layout, self.weights)
        self._all = [by_name[slot.name] for slot in (*self.layout.trainable, *self.layout.frozen)]
        self._flags = [parameter.requires_grad for parameter in self._all]
        self._outside = Outside(job, model)
        self._has_told = False
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

    def by_counts(self, total: Flat, batches: int) -> None:
        by_counts(total, batches)

    def descend(self, total: Flat, steps: int) -> None:
        """One step of the job's optimizer along this gradient, the `steps`-th."""
        self._advance(steps - 1)  # if others made steps meanwhile
        settle(self.weights, total)
        self.move_buffers(total)
        self.logged = total.logged
        if self.descent.is_bare and self._after_step is None:
            self.descent.step(total.trainable, total.touched, steps - 1, total.trainable_runs)
            return
        is_torchs = self.descent.is_torchs and self._after_step is None
        self._resting.look(is_torchs)
        if not is_torchs:
            bring_home(self.descent.parameters, self.weights.trainable)
        self.descent.step(total.trainable, total.touched, steps - 1, total.trainable_runs)
        if not is_torchs:
            bring_home(self.descent.parameters, self.weights.trainable)
        self._advance(steps)
        self._call_after_step(steps - 1)
        self._see_what_moved(self._resting.moved(is_torchs))

    def follow(self, total: Flat, steps: int) -> None:
        """Nodes have made steps of their own, until this one."""
        self.logged = total.logged
        self._advance(steps)
        if self._after_step is not None:
            self._resting.look(is_torchs=False)
            self._call_after_step(steps - 1)
            self._see_what_moved(self._resting.moved(is_torchs=False))

    def _advance(self, steps: int) -> None:
        if self.descent.schedulers:
            self.descent.advance(steps, self._here(steps).epoch)

    def _call_after_step(self, number: int) -> None:
        """The user's own word on the weights; what it makes of them is this version."""
        if self._after_step is None:
            return
        where = self._here(number)
        enter(where)
        self._outside.look()
        with generators, users_code("after_step failed"), torch.no_grad():
            seed_everything(mix(self._seed, number, 1))
            self._after_step(self.model, where)
        if (kept := self._outside.check()) and not self._has_told:
            self._has_told = True
            log.warning(
                "after_step keeps %s, which is no part of the model: a run that is resumed begins without it, and "
                "evaluate() does not see it; keep it in a buffer (register_buffer)",
                kept,
            )
        self._rebind()
        if not all(bool(torch.isfinite(weight).all()) for weight in self.weights.trainable):
            raise TrainingFailed(f"after_step made weights that are not finite, in step {number}")

    @torch.no_grad()
    def _rebind(self) -> None:
        """What was put in a parameter's place is copied to where it lives; its memory stays."""
        now = dict(self.model.named_parameters())
        slots = [*self.layout.trainable, *self.layout.frozen]
        views = [*self.weights.trainable, *self.weights.frozen]
        for slot, view, parameter in zip(slots, views, self._all, strict=True):
            if now.get(slot.name) is not parameter or parameter.shape != view.shape or parameter.dtype != view.dtype:
                raise TrainingFailed(f"after_step put another parameter in the place of {slot.name}: use copy_")
        bring_home(self._all, views)

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

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Meanwhile the weights are those to be evaluated and kept, if the optimizer trains with others (schedule-free
        ones); then they are, to the bit, what they were.
        """
        if not self.descent.switches:
            yield
            return
        before = self.weights.raw.clone()
        self.rest()
        try:
            yield
        finally:
            self.descent.train()
            bring_home(self.descent.parameters, self.weights.trainable)
            self.weights.raw.copy_(before)

    def rest(self) -> None:
        """From now on the weights are those to be kept."""
        self.descent.rest()
        bring_home(self.descent.parameters, self.weights.trainable)

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
