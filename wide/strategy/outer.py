"""The outer optimizer of local training. Knows tensors; knows no network, no layouts, no time.

DiLoCo:   b ← μb + Δ,   θ ← θ − η(Δ + μb)      Δ: the sample-weighted mean of what the nodes' own steps changed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

MOST_MOMENTUM = 0.3


class Outer(NamedTuple):
    """The outer learning rate η and momentum μ."""

    rate: float
    momentum: float


class Nesterov:
    """One momentum buffer for each tensor, made when there is momentum to remember."""

    def __init__(self, buffers: Sequence[torch.Tensor] = ()) -> None:
        self.buffers = list(buffers)

    @torch.no_grad()
    def step(self, weights: Sequence[torch.Tensor], deltas: Sequence[torch.Tensor], outer: Outer) -> None:
        if not outer.momentum:
            self.buffers = []
            torch._foreach_add_(list(weights), list(deltas), alpha=-outer.rate)
            return
        if not self.buffers:
            self.buffers = [torch.zeros_like(delta) for delta in deltas]
        torch._foreach_mul_(self.buffers, outer.momentum)
        torch._foreach_add_(self.buffers, list(deltas))
        torch._foreach_add_(list(weights), list(deltas), alpha=-outer.rate)
        torch._foreach_add_(list(weights), self.buffers, alpha=-outer.rate * outer.momentum)


def momentum_for(length: int) -> Outer:
    """What suits rounds of this many steps: none for one, which is data parallel training, and never much (0.9 needs
    rounds of hundreds and long runs; docs/findings.md). η + μ = 1: a delta that does not change moves the weights by
    itself, no more.
    """
    momentum = MOST_MOMENTUM * (1 - 1 / math.sqrt(max(1, length)))
    return Outer(1 - momentum, momentum)
