"""Does the user's loss change what only the optimizer should change, or what was taken for constant? Looked at around
every lease, cheaply: pointers, flags and version counters tell most of it; a sum over the memory itself tells the rest,
as often as it costs little.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from wide.codec.layout import Flat, Layout
from wide.codec.sums import Sums, Untouched
from wide.errors import ParametersMoved, TrainingFailed

FIRST_LEASES = 20  # around these all is looked at, whatever it costs
SELDOM = 16  # every so many leases strides, shapes and the objects themselves are looked at
LOOKS = 3  # before a lease, after its first batch, after it
SHARE = 0.01  # of the time spent on leases, for looking at all of the memory later


class Home(NamedTuple):
    """Where the model keeps a parameter, or a buffer, and how it was in the beginning."""

    name: str
    owner: dict[str, Any]
    key: str
    parameter: torch.Tensor
    state: tuple[int, bool, tuple[int, ...], torch.Size]  # pointer, requires_grad, stride, shape


class Watch:
    """`begin` before a lease's batches, `end` after them. What is known to move (`layout.moved`) may do so."""

    def __init__(self, model: nn.Module, layout: Layout, bound: Flat) -> None:
        fixed = layout.fixed
        self._homes = _homes(model, "_parameters", dict(model.named_parameters()))
        constant = {slot.name for slot in layout.constant}
        self._constant = [h for h in _homes(model, "_buffers", dict(model.named_buffers())) if h.name in constant]
        self._fixed = [home for home in self._homes if home.name in fixed] + self._constant
        self._parameters = [home.parameter for home in self._fixed]
        self._pointers = [p.data_ptr() for p in self._parameters]
        self._flags = [p.requires_grad for p in self._parameters]
        self._owners = [(module._parameters, len(module._parameters)) for module in model.modules()]
        self._resting = Untouched(bound.raw, [*layout.frozen, *layout.constant])
        self._sums = Sums(bound.raw, [slot for slot in layout.slots if slot.offset < layout.live_nbytes])
        self._may_change = {slot.name for slot in layout.slots} - fixed
        self._is_always_whole = bool(layout.moved) or self._sums.is_small  # those who move may move more
        self._was_always_whole = True
        self._owed_s = self._began_at = 0.0
        self._leases = 0
        self._versions: list[int] = []
        self._before: np.ndarray | None = None

    def begin(self) -> None:
        self._versions = [p._version for p in self._parameters]
        self._leases += 1
        self._resting.begin()
        if self._is_always_whole:
            self._before = self._sums.take()
        elif self._leases <= FIRST_LEASES or self._owed_s >= 0:
            began = time.perf_counter()
            self._before = self._sums.take()
            self._began_at = time.perf_counter()
            self._owed_s -= LOOKS * (self._began_at - began)
        else:
            self._before, self._was_always_whole = None, False
            self._began_at = time.perf_counter()

    def forget(self) -> None:
        """What never changes comes again."""
        self._resting.forget()

    def first_batch(self) -> None:
        """Two batches may undo what each of them does: so there is a look after the first one, too. Raises as `end`."""
        if self._before is not None:
            self._compare([])

    def end(self) -> None:
        """Raises, if something has moved."""
        moved = [home.name for home in self._constant if home.owner.get(home.key) is not home.parameter]
        parameters = self._parameters
        if [p._version for p in parameters] != self._versions or [p.data_ptr() for p in parameters] != self._pointers:
            moved += self._moved()
        elif self._leases <= FIRST_LEASES or self._leases % SELDOM == 0:
            moved += self._moved()
            self._check_objects()
        if not self._is_always_whole:
            self._owed_s += SHARE * (time.perf_counter() - self._began_at)
        self._compare(moved)

    def _moved(self) -> list[str]:
        return [
            home.name
            for home, p, version in zip(self._fixed, self._parameters, self._versions, strict=True)
            if (p._version, p.data_ptr(), p.requires_grad, p.stride(), p.shape) != (version, *home.state)
        ]

    def _compare(self, moved: list[str]) -> None:
        if self._before is not None and (now := self._sums.take()).tobytes() != self._before.tobytes():
            found = [name for name in self._sums.changed(self._before, now) if name not in self._may_change]
            self._add(found, moved, is_late=not self._was_always_whole)
        self._add(self._resting.changed(), moved, self._resting.is_late)
        if [p.requires_grad for p in self._parameters] != self._flags:
            moved += [name for name in self._moved() if name not in moved]
        if moved:
            raise ParametersMoved(list(dict.fromkeys(moved)))

    def _add(self, found: list[str], moved: list[str], is_late: bool) -> None:
        """What was found by a look at the memory, and by nothing else."""
        new = [name for name in found if name not in moved]
        if new and is_late:
            raise TrainingFailed(
                f"{new[0]} is changed by the loss in place, by way of .data, and not from the first batch on, which is "
                "noticed too late: change it under torch.no_grad() instead"
            )
        moved += new

    def _check_objects(self) -> None:
        """A parameter in the place of another one, or a new one: the optimizer does not know it."""
        for home in self._homes:
            if home.owner.get(home.key) is not home.parameter:
                raise TrainingFailed(
                    f"parameter {home.name} was replaced by another object while a batch was computed, and the "
                    "optimizer knows only the first one: assign its value instead (.data = …, or copy_ under "
                    "torch.no_grad())"
                )
        for owner, count in self._owners:
            if len(owner) != count:
                raise TrainingFailed(
                    f"parameter {list(owner)[-1]} was added while a batch was computed, and no optimizer knows it: "
                    "make it in model()"
                )


def _homes(model: nn.Module, kind: str, tensors: dict[str, Any]) -> list[Home]:
    names = {id(tensor): name for name, tensor in tensors.items()}  # of tied ones the first
    return [
        Home(names[id(t)], owner, key, t, (t.data_ptr(), t.requires_grad, t.stride(), t.shape))
        for owner in (getattr(module, kind) for module in model.modules())
        for key, t in owner.items()
        if t is not None
    ]
