"""Updates at hand, about which nothing was decided yet; and how far two of them are apart. Knows tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from wide.codec.digest import Later
from wide.codec.layout import Flat, apart
from wide.coordinator.canaries import MOST_PAIRS
from wide.job.here import Logged
from wide.telemetry.journey import Journey

CPUS_APART, DEVICES_APART = 1e-3, 2e-2  # how far the gradients of one batch may be, relative to their length
METRICS_APART = 0.1  # relative to them, or to 1: a sample more or less that is right may depend on the last bit


class Taken(NamedTuple):
    """An update at hand: its numbers, the samples in each of its batches, their losses, and how it came about."""

    flat: Flat
    sizes: Sequence[int]
    losses: Sequence[float]
    journey: Journey
    digest: int | Later = 0
    is_on_cpu: bool = True


class Comparison:
    """Two nodes compute the same batch: the first answer is kept until the other one comes; not of too many pairs, for
    some nodes never answer. `goes_by`: which logged metrics training depends on; None: none.
    """

    def __init__(self, release: Callable[[Flat], None], goes_by: Callable[[str], bool] | None = None) -> None:
        self._release, self._goes_by = release, goes_by
        self.kept: dict[int, Taken] = {}  # by pair

    def done(self, pair: int, is_kept: bool, taken: Taken) -> None:
        """Nothing more follows from this answer, nor from the other one of its pair; or it is kept for that."""
        if is_kept:
            self.kept[pair] = taken
            gone = list(self.kept)[:-MOST_PAIRS]
        else:
            self._release(taken.flat)
            gone = [pair] if pair in self.kept else []
        for other in gone:
            self._release(self.kept.pop(other).flat)

    def distance(self, pair: int, taken: Taken) -> float | None:
        """The largest one of the gradients', the losses' and the counts', each relative to what they are; over what is
        allowed to these two devices. So are metrics, of which more is allowed.
        """
        if pair not in self.kept:
            return None
        flat, losses, kept = taken.flat, taken.losses, self.kept[pair]
        other, its_losses = kept.flat, kept.losses
        far = apart(flat, other)
        if len(flat.weights) != len(other.weights):
            return math.inf  # one says that its losses are totals
        for mine, theirs in zip((*losses, *flat.weights), (*its_losses, *other.weights), strict=False):
            far = max(far, abs(mine - theirs) / max(abs(mine), abs(theirs), 1e-6))
        far /= CPUS_APART if taken.is_on_cpu and kept.is_on_cpu else DEVICES_APART
        if self._goes_by is not None:
            far = max(far, _metrics_apart(flat.logged, other.logged, self._goes_by) / METRICS_APART)
        return far if math.isfinite(far) else math.inf


def _metrics_apart(one: Logged, other: Logged, goes_by: Callable[[str], bool]) -> float:
    """How far the means are that differ most."""
    far = 0.0
    for name in filter(goes_by, one.keys() | other.keys()):
        (mine, samples), (theirs, its_samples) = one.get(name, (0.0, -1.0)), other.get(name, (0.0, -1.0))
        if samples != its_samples:
            return math.inf
        if mine != theirs and not (math.isnan(mine) and math.isnan(theirs)):
            apart = abs(mine - theirs) / max(abs(mine), abs(theirs), samples)
            far = max(far, apart) if math.isfinite(apart) else math.inf
    return far
