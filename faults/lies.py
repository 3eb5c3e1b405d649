"""Lies: what a node hands in instead of what it computed. Knows flat buffers and numbers; knows no network.

Each lie changes an answer where it lies, before it is sent: nothing of a pool's protocol is broken by it.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from wide.codec.layout import Flat

SHORT_S, LONG_S = 1e-6, 1e8
PLAUSIBLE = 2.0  # a loss that nobody computed
HONEST_FIRST = 20  # leases, for whoever knows that newcomers are tried


@dataclass(slots=True)
class Answer:
    """What is handed in for a lease. `seconds`: what everything took; None: what it really took."""

    total: Flat
    losses: list[float]
    seconds: float | None = None


Lie = Callable[[Answer, random.Random], None]


def nan(answer: Answer, chance: random.Random) -> None:
    """One number is none."""
    numbers = _numbers(answer.total.trainable, chance)
    numbers[chance.randrange(len(numbers))] = math.nan


def thousandfold(answer: Answer, chance: random.Random) -> None:
    _scale(answer.total, 1000.0)


def flipped(answer: Answer, chance: random.Random) -> None:
    """All signs: uphill."""
    _scale(answer.total, -1.0)


def scaled(answer: Answer, chance: random.Random) -> None:
    _scale(answer.total, 1.05)


def zeros(answer: Answer, chance: random.Random) -> None:
    answer.total.raw.zero_()
    answer.total.touched = (1 << len(answer.total.trainable)) - 1
    answer.total.weights, answer.total.logged = [], {}
    answer.losses = [PLAUSIBLE] * len(answer.losses)


def loss(answer: Answer, chance: random.Random) -> None:
    """A million times too large, or absurd."""
    answer.losses = [chance.choice((1e6 * value, 1e90)) for value in answer.losses]


def loss_low(answer: Answer, chance: random.Random) -> None:
    """Nobody learns as well as this node."""
    answer.losses = [1e-3 * value for value in answer.losses]


def times(answer: Answer, chance: random.Random) -> None:
    answer.seconds = chance.choice((SHORT_S, LONG_S))


def samples(answer: Answer, chance: random.Random) -> None:
    """Each batch counts as if it were a thousand."""
    answer.total.weights = [1000.0] * len(answer.losses)


def bitflip(answer: Answer, chance: random.Random) -> None:
    """One bit of one number, as memory without error correction does it."""
    data = _numbers(answer.total.trainable, chance).view(torch.uint8)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)


def buffers(answer: Answer, chance: random.Random) -> None:
    """A running mean, or variance, is no number; a job without such has nothing to lie about."""
    if answer.total.averaged:
        numbers = _numbers(answer.total.averaged, chance)
        numbers[chance.randrange(len(numbers))] = math.nan


class Stale:
    """The update before this one, again."""

    def __init__(self) -> None:
        self._last: torch.Tensor | None = None

    def __call__(self, answer: Answer, chance: random.Random) -> None:
        mine = answer.total.raw.clone()
        if self._last is not None:
            answer.total.raw.copy_(self._last)
        self._last = mine


_ALL: tuple[Lie, ...] = (nan, thousandfold, flipped, scaled, zeros, loss, loss_low, times, samples, bitflip, buffers)
LIES: dict[str, Lie] = {lie.__name__: lie for lie in _ALL} | {"canary": flipped}
KINDS = (*LIES, "stale")


class Liar:
    """Decides when to lie, and keeps count: `tally` is a file that grows by a byte for each lease that was handed in,
    `x` for a lie and `.` for an honest one, so that others can count, too.
    """

    def __init__(
        self, kind: str, share: float | None = None, honest: int | None = None, seed: int = 0, tally: str | None = None
    ) -> None:
        self._lie, self._chance = LIES[kind] if kind in LIES else Stale(), random.Random(seed)
        self._share = share if share is not None else 0.01 if kind == "bitflip" else 1.0
        self._honest = honest if honest is not None else HONEST_FIRST if kind == "canary" else 0
        self.is_lazy = kind == "zeros"  # who does not compute has to know beforehand
        self._tally = os.open(tally, os.O_WRONLY | os.O_CREAT | os.O_APPEND) if tally is not None else None
        self.leases = self.lies = 0
        self._is_lying = False

    def decides(self) -> bool:
        """To lie about the lease that is next."""
        self._is_lying = self.leases >= self._honest and self._chance.random() < self._share
        return self._is_lying

    @contextmanager
    def telling(self, answer: Answer) -> Iterator[None]:
        """It is handed in meanwhile."""
        if self._is_lying:
            self._lie(answer, self._chance)
        yield
        self.leases += 1
        self.lies += self._is_lying
        if self._tally is not None:
            os.write(self._tally, b"x" if self._is_lying else b".")


def _numbers(tensors: list[torch.Tensor], chance: random.Random) -> torch.Tensor:
    """Those of one of the tensors, the larger the likelier, as they lie in memory: none has gaps."""
    (one,) = chance.choices(tensors, weights=[tensor.numel() for tensor in tensors])
    return torch.as_strided(one, (one.numel(),), (1,), one.storage_offset())


def _scale(total: Flat, factor: float) -> None:
    """What lies between the tensors stays as it is: an honest answer may be the next to use this memory."""
    torch._foreach_mul_([*total.trainable, *total.averaged], factor)
