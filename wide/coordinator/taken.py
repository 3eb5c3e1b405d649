"""Updates at hand, about which nothing was decided yet; and how far two of them are apart. Knows tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from wide.codec.layout import Flat
from wide.telemetry.journey import Journey


class Taken(NamedTuple):
    """An update at hand: its numbers, the samples in each of its batches, their losses, and how it came about."""

    flat: Flat
    sizes: Sequence[int]
    losses: Sequence[float]
    journey: Journey
    digest: int = 0


class Comparison:
    """Two nodes compute the same batch: the first answer is kept until the other one comes. One pair at a time."""

    def __init__(self, release: Callable[[Flat], None]) -> None:
        self._release = release
        self.kept: Flat | None = None
        self._pair, self._losses = 0, [0.0]

    def done(self, pair: int, is_kept: bool, taken: Taken) -> None:
        """Nothing more follows from this answer, nor from the other one of its pair; or it is kept for that."""
        if self.kept is not None and (is_kept or pair == self._pair):
            self._release(self.kept)
            self.kept = None
        if is_kept:
            self._pair, self.kept, self._losses = pair, taken.flat, list(taken.losses)
        else:
            self._release(taken.flat)

    def distance(self, pair: int, flat: Flat, losses: Sequence[float], allowed: float) -> float | None:
        """The larger one of the gradients' and the losses', each relative to what they are; over what is allowed."""
        if self.kept is None or pair != self._pair:
            return None
        apart = longest = 0.0
        for here, there in zip(flat.trainable, self.kept.trainable, strict=True):
            apart += _square(here.double() - there.double())
            longest += max(_square(here.double()), _square(there.double()))
        far = math.sqrt(apart / longest) if longest else 0.0
        for mine, other in zip(losses, self._losses, strict=False):
            far = max(far, abs(mine - other) / max(abs(mine), abs(other), 1e-6))
        return far / allowed if math.isfinite(far) else math.inf


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.abs().square().sum())
