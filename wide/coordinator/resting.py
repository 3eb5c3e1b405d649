"""What an optimizer's step should leave alone: frozen parameters, and buffers that were taken for constant. Hooks of
the user's own, or a scheduler, may move them all the same (a teacher follows its student): then nodes must know.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from wide.codec.layout import Flat, Layout
from wide.codec.sums import Untouched
from wide.errors import TrainingFailed


class Resting:
    """`look` before a step, `moved` after it."""

    def __init__(self, model: nn.Module, layout: Layout, weights: Flat) -> None:
        slots = [*layout.frozen, *layout.constant]
        tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        self._names = [slot.name for slot in slots]
        self._tensors = [tensors[name] for name in self._names]
        self._buffers: list[tuple[dict[str, Any], str, Tensor]] = [
            (module._buffers, key, buffer)
            for module in model.modules()
            for key, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._memory = Untouched(weights.raw, slots)
        self._before: list[tuple[int, int]] = []

    def look(self, is_torchs: bool) -> None:
        """`is_torchs`: nothing but torch's own code will run, of which version counters tell all."""
        self._before = self._counters()
        if not is_torchs:
            self._memory.begin()

    def moved(self, is_torchs: bool) -> list[str]:
        now = self._counters()
        names = [name for name, was, new in zip(self._names, self._before, now, strict=True) if was != new]
        if is_torchs:
            return names
        for owner, key, buffer in self._buffers:
            if owner.get(key) is not buffer:
                raise TrainingFailed(
                    f"buffer {key} was replaced by another tensor in an optimizer's or a scheduler's step, where nodes "
                    "do not see it: change it in place (copy_)"
                )
        return names + self._changed(names)

    def _counters(self) -> list[tuple[int, int]]:
        return [(tensor._version, tensor.data_ptr()) for tensor in self._tensors]

    def _changed(self, known: list[str]) -> list[str]:
        """By way of `.data`, which no counter tells."""
        changed = [name for name in self._memory.changed() if name not in known]
        if changed and self._memory.is_late:
            raise TrainingFailed(
                f"{changed[0]} is changed by an optimizer's or a scheduler's step, by way of .data, and not from the "
                "first step on, which is noticed too late: change it under torch.no_grad() instead"
            )
        return changed
