"""Several batches in one pass through the model, where that is the same mathematics and quicker. Never in `sync`.

Whether it is the same is tried, not guessed: both ways are computed and compared. A model that draws random numbers or
changes its buffers (dropout, BatchNorm) would see a difference between one large batch and several small ones; so would
a loss that is no mean over samples, or that compares samples with each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from wide.codec.layout import Flat, join
from wide.errors import TrainingFailed
from wide.job.here import was_asked
from wide.job.loading import users_code
from wide.job.seeding import seed_everything, states
from wide.node.trainer import Enough, Place, Trainer

TOLERANCE = 1e-3  # of the gradient's length, by which another order of additions may change it
GAIN = 1.1  # how much quicker a wider pass must be
MOST = 16  # batches in one pass
TRIES = 3


class Fused:
    """Sums of gradients. `width` batches go in one pass; twice as many are tried until that does not help any more."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.width = 1
        self._candidate = 2
        self._times_s: list[tuple[float, float]] = []  # of the candidate: as it was, and in one pass

    def sum(self, places: Sequence[Place], batch_at: Callable[[int], Any]) -> tuple[Flat, list[float]]:
        """What Trainer.sum gives, up to rounding."""
        if self._candidate == 1 or len(places) == 1:
            return self._trainer.sum(places, batch_at)
        parts: list[tuple[Flat, list[float]]] = []
        width = self._candidate
        for first in range(0, len(places), width):
            mine = places[first : first + width]
            try:
                batches = [batch_at(first + i) for i in range(len(mine))]
            except Enough:
                if not parts:
                    raise
                break
            is_trial = len(mine) == self._candidate > self.width and self._are_alike(mine)
            parts.append(self._try(mine, batches) if is_trial else self._as_usual(mine, batches))
        return self._added(parts)

    def _as_usual(self, places: Sequence[Place], batches: list[Any]) -> tuple[Flat, list[float]]:
        if self.width == 1:
            return self._trainer.sum(places, batches.__getitem__)
        cuts = [slice(i, i + self.width) for i in range(0, len(places), self.width)]
        return self._added([self._at_once(places[cut], batches[cut]) for cut in cuts])

    def _at_once(self, places: Sequence[Place], batches: list[Any]) -> tuple[Flat, list[float]]:
        batch = joined(batches) if len(batches) > 1 and self._are_alike(places) else None
        if batch is None:
            return self._trainer.sum(places, batches.__getitem__)
        weight, samples = sum(place.weight for place in places), sum(place.samples for place in places)
        with users_code("computing the loss and its gradient failed"):
            leaf, loss = self._trainer.leaf(batch, places[0]._replace(weight=weight, samples=samples))
        leaf.weights = [each / len(places) for each in leaf.weights for _ in places]
        return leaf, [loss] * len(places)

    def _try(self, places: Sequence[Place], batches: list[Any]) -> tuple[Flat, list[float]]:
        began = time.perf_counter()
        apart, losses = self._as_usual(places, batches)
        between = time.perf_counter()
        try:
            together, _ = self._at_once(places, batches)
        except (TrainingFailed, RuntimeError):  # it does not fit, or will not be put together
            self._settle(is_better=False)
            return apart, losses
        ended = time.perf_counter()
        is_same = joined(batches) is not None and not was_asked() and not self._has_drawn(places)
        is_same = is_same and not self._trainer.has_moved(apart)
        self._times_s.append((between - began, ended - between))
        if not is_same or not _are_close(apart, together):
            self._candidate = self.width = 1
        elif len(self._times_s) == TRIES:
            self._settle(GAIN * min(b for _, b in self._times_s) <= min(a for a, _ in self._times_s))
        self._trainer.release(together)
        return apart, losses

    def _settle(self, is_better: bool) -> None:
        self._times_s.clear()
        if is_better:
            self.width = self._candidate
        self._candidate = min(2 * self.width, MOST) if is_better else self.width

    def _are_alike(self, places: Sequence[Place]) -> bool:
        return len({self._trainer.phase_of(place) for place in places}) == 1 and _are_alike(places)

    def _has_drawn(self, places: Sequence[Place]) -> bool:
        """Has the last pass drawn random numbers? Then the generators are not where its seed had put them."""
        after = states(self._trainer.device)
        seed_everything(self._seed(places), None if self._trainer.device.type == "cpu" else self._trainer.device)
        return after != states(self._trainer.device)

    def _seed(self, places: Sequence[Place]) -> int:
        return self._trainer.seed_of(places[0].step, places[0].batch)

    def _added(self, parts: list[tuple[Flat, list[float]]]) -> tuple[Flat, list[float]]:
        total, losses = parts[0]
        for other, more in parts[1:]:
            join(total, other)
            self._trainer.release(other)
            losses = losses + more
        return total, losses


def joined(batches: list[Any]) -> Any | None:
    """One batch of all their samples; None if they cannot be put together."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        is_one = first.dim() > 0 and all(b.shape[1:] == first.shape[1:] and b.dtype == first.dtype for b in batches)
        return torch.cat(batches) if is_one else None
    if isinstance(first, dict):
        parts = {key: joined([batch[key] for batch in batches]) for key in first}
        return parts if all(part is not None for part in parts.values()) else None
    if isinstance(first, list | tuple) and first:
        items: list[Any] = [joined([batch[i] for batch in batches]) for i in range(len(first))]
        if any(item is None for item in items):
            return None
        return type(first)(*items) if hasattr(first, "_fields") else type(first)(items)
    return None


def _are_alike(places: Sequence[Place]) -> bool:
    """Does a sample weigh the same in all of them?"""
    weights = [place.weight / place.samples for place in places]
    return math.isclose(min(weights), max(weights), rel_tol=1e-9)


def _are_close(apart: Flat, together: Flat) -> bool:
    if apart.touched != together.touched:
        return False
    pairs = zip(apart.trainable, together.trainable, strict=True)
    difference = math.sqrt(sum(float((a - b).abs().square().sum()) for a, b in pairs))
    return difference <= TOLERANCE * math.sqrt(sum(float(a.abs().square().sum()) for a in apart.trainable))
