"""What nodes start from while a step is being gathered: ahead of the last one. Knows tensors, no network, no optimizer.

    each arrival:           θ ← θ − ηg          at once, so that the next node starts from it
    when a step is whole:   θ ← anchor          and the job's optimizer makes its real step, momentum included

With Nesterov's momentum that is  θ ← θ − ηβm  on top of the arrivals: momentum moves once a step, not once an arrival,
which would make it as many times too strong as there are nodes.

Where a step is not linear in the gradient (Adam), parts of it cannot be applied. But a step is much like the one before
it, so nodes start from where the next one will probably end:   θ ← θ + s(θ − θ before the last step)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class Delayed:
    """`weights` between two steps of their optimizer."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = list(weights)
        self._anchor: list[torch.Tensor] = []

    @torch.no_grad()
    def push(self, gradients: Sequence[torch.Tensor], rates: Sequence[float]) -> None:
        """A part of a step's gradient has arrived; `rates` are the learning rates of the weights."""
        if not self._anchor:
            self._anchor = [weight.clone() for weight in self._weights]
        for weight, gradient, rate in zip(self._weights, gradients, rates, strict=True):
            weight.sub_(gradient, alpha=min(rate, torch.finfo(weight.dtype).max))  # more is an exception

    @torch.no_grad()
    def lead(self, before: Sequence[torch.Tensor], steps: float) -> None:
        """Go on in the direction of the last step, which began at `before`, for so many steps."""
        self._anchor = [weight.clone() for weight in self._weights]
        for weight, old in zip(self._weights, before, strict=True):
            weight.add_(weight - old, alpha=steps)

    @torch.no_grad()
    def restore(self) -> None:
        """Back to where the last whole step ended."""
        for weight, before in zip(self._weights, self._anchor, strict=True) if self._anchor else ():
            weight.copy_(before)
        self._anchor = []
