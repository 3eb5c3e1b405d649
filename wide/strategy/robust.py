"""`--robust`: means that one wrong update cannot carry away. Knows tensors; knows no network, no layouts, no time.

    clip      each update is cut to the usual length: it keeps its weight, and its direction
    trimmed   of each number, the mean of the middle: a quarter of the weight is left out at either end, or as much as
              the heaviest node has, so that none is in it on its own word
    median    of each number, the weighted median

The last two have one voice for each node, cut as with `clip`, and keep them until the version is made; of one or two
they take the mean.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Generic

import torch

from wide.strategy.fold import Model, U
from wide.strategy.gather import Gathering, Part, Sum
from wide.strategy.usual import Lengths

TIMES = 1.0  # the usual length: honest updates lose nothing by it, and one of four that lies wins least
FEW = 3  # updates, or nodes, to compare with
TRIMMED = 0.25  # of the weight, at either end
MIDDLE = 0.5 - 1e-6  # where the weights on both sides are equal, that is the mean of two
CHUNK = 1 << 20  # numbers that are sorted at once, of all nodes together


class Limit(Generic[U]):
    """How long an update may be. Parameters and buffers are measured apart: they have nothing to do with each other."""

    def __init__(self) -> None:
        self._lengths = Lengths(wanders=True), Lengths(wanders=True)

    @property
    def is_known(self) -> bool:
        return self._lengths[0].count >= FEW

    def look(self, update: U, part: Part) -> None:
        """It is one of those that say what is usual."""
        for runs, lengths in zip((update.trainable_runs, update.averaged_runs), self._lengths, strict=True):
            if (norm := _norm(runs)) > 0:
                lengths.add(norm / (part.weight if part.steps else 1.0), part.steps or part.weight)

    def cut(self, update: U, part: Part) -> None:
        for runs, lengths in zip((update.trainable_runs, update.averaged_runs), self._lengths, strict=True):
            usual = lengths.usual(part.steps or part.weight) * (part.weight if part.steps else 1.0)
            norm = _norm(runs)
            if usual and norm > TIMES * usual:
                for run in runs:
                    run *= TIMES * usual / norm


class Clipped(Generic[U]):
    """A sum of updates none of which is much longer than usual. Before that is known, they are kept."""

    def __init__(self, model: Model[U]) -> None:
        self._model, self._sum, self._limit = model, Sum(model), Limit[U]()
        self._kept: list[tuple[U, Part]] = []

    @property
    def held(self) -> list[U]:
        return [*self._sum.held, *(update for update, _ in self._kept)]

    def fit(self, update: U, part: Part) -> bool:
        self._limit.look(update, part)
        if self._kept or not self._limit.is_known:
            return False
        self._limit.cut(update, part)
        return True

    def add(self, update: U, part: Part) -> None:
        if self._kept or not self._limit.is_known:
            self._kept.append((update, part))
        else:
            self._sum.add(update, part)

    def take(self) -> U:
        kept, self._kept = self._kept, []
        for update, part in kept:
            if self._limit.is_known:
                self._limit.cut(update, part)
            self._sum.add(update, part)
        return self._sum.take()

    def void(self) -> None:
        self._sum.void()
        for update, _ in self._kept:
            self._model.release(update)
        self._kept = []


class Middle(Generic[U]):
    """The middle of what the nodes say, number by number; `trimmed` of the weight is left out at either end."""

    def __init__(self, model: Model[U], trimmed: float) -> None:
        self._model, self._trimmed, self._limit = model, trimmed, Limit[U]()
        self._voices: dict[int, tuple[U, Part]] = {}  # by node, the first one's first

    @property
    def held(self) -> list[U]:
        return [update for update, _ in self._voices.values()]

    def fit(self, update: U, part: Part) -> bool:
        return False  # what it counts for is known when all are there

    def add(self, update: U, part: Part) -> None:
        if part.node in self._voices:
            said, before = self._voices[part.node]
            steps = max(before.steps, part.steps)
            update, part = self._model.join(said, update), Part(part.node, before.weight + part.weight, steps)
        self._voices[part.node] = update, part

    def take(self) -> U:
        voices, self._voices = list(self._voices.values()), {}
        for update, part in voices:
            self._limit.look(update, part)
        for update, part in voices if self._limit.is_known else ():
            self._limit.cut(update, part)  # who has half of the weight is the middle
        updates, weights = [update for update, _ in voices], [part.weight for _, part in voices]
        if len(voices) >= FEW:
            for runs in zip(*([*update.trainable_runs, *update.averaged_runs] for update in updates), strict=True):
                middle_(runs, weights, self._trimmed)
        first, *others = updates
        for update in others:
            first = self._model.join(first, update)  # of three, its numbers are zeros; what it logged and counts is not
        return first

    def void(self) -> None:
        for update in self.held:
            self._model.release(update)
        self._voices = {}


@torch.no_grad()
def middle_(runs: Sequence[torch.Tensor], weights: Sequence[float], trimmed: float) -> None:
    """Each run is `weight` times something: the first becomes the middle of these, times all weights; the others 0."""
    real = [torch.view_as_real(run).flatten() if run.is_complex() else run for run in runs]
    all_weights, length = sum(weights), max(1, CHUNK // len(runs))
    shares = torch.tensor(weights, dtype=torch.float64) / all_weights  # (nodes,)
    trimmed = min(max(trimmed, float(shares.max())), MIDDLE)
    for chunk in zip(*(torch.split(run, length) for run in real), strict=True):
        whole = torch.stack([part / weight for part, weight in zip(_precise(chunk), weights, strict=True)])
        ordered, places = whole.sort(dim=0)  # (nodes, chunk)
        until = (mass := shares[places]).cumsum(dim=0)
        inside = (until.clamp(max=1 - trimmed) - (until - mass).clamp(min=trimmed)).clamp_(min=0)
        chunk[0].copy_((ordered * inside).sum(dim=0) / inside.sum(dim=0) * all_weights)
        for part in chunk[1:]:
            part.zero_()


def _precise(chunk: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part.to(_wide(part.dtype)) for part in chunk]


def _norm(runs: Sequence[torch.Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(run, dtype=_wide(run.dtype))) ** 2 for run in runs))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


GATHERINGS: dict[str, Gathering] = {
    "clip": Clipped,
    "trimmed": partial(Middle, trimmed=TRIMMED),
    "median": partial(Middle, trimmed=MIDDLE),
}
