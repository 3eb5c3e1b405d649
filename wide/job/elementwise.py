"""Is an optimizer elementwise? A trial, with small tensors of every kind: stepped one by one, and by slices. Knows
torch's own optimizers.
"""

from __future__ import annotations

import torch
from torch import nn

from wide.job.slices import Place, Slices, Step, are_equal, like

STEPS = 4
SHAPES = ((5, 13), (), (33, 9), (1,), (16,), (3, 7, 2), (37,), (8, 64))  # with and without a rest behind whole vectors
APART = 64  # numbers: a tensor begins at a multiple of so many bytes, whatever its dtype
SLICE = 2 * APART


def elementwise_state(optimizer: torch.optim.Optimizer, step: Step) -> frozenset[str] | None:
    """What of its state is one number for each number, if its step by slices gives the same bits; None, if not."""
    dtypes = {parameter.dtype for group in optimizer.param_groups for parameter in group["params"]}
    if not dtypes or not all(dtype.is_floating_point for dtype in dtypes):
        return None
    try:
        found = {_Trial(optimizer, step, dtype).state() for dtype in dtypes}
    except (RuntimeError, ValueError, TypeError):  # such as "needs matrices": so it is not
        return None
    return found.pop() if len(found) == 1 else None


class _Trial:
    """The same numbers twice, with an optimizer each."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Step, dtype: torch.dtype) -> None:
        self._step, self._dtype, self._places = step, dtype, list[Place]()
        self._random, self._end = torch.Generator().manual_seed(0), 0
        for shape in SHAPES:
            count = torch.Size(shape).numel()
            self._places.append(Place(0, self._end, self._end + count))
            self._end += -(-count // APART) * APART
        start = self._numbers(1.0)
        self._runs = [start, start.clone()]
        self._views = [list(map(nn.Parameter, self._cut(run))) for run in self._runs]
        groups = len(optimizer.param_groups)
        self._both = [like(optimizer, [views[n::groups] for n in range(groups)]) for views in self._views]

    def state(self) -> frozenset[str] | None:
        """As above."""
        (whole, pieces), (ours, theirs) = self._both, self._views
        gradient = self._numbers(0.1)
        self._one_by_one(whole, ours, gradient)
        self._one_by_one(pieces, theirs, gradient)
        largest = pieces.state.get(theirs[2], {}).items()
        names = frozenset(n for n, v in largest if isinstance(v, torch.Tensor) and v.shape == theirs[2].shape)
        sliced = Slices(pieces, self._step, theirs, self._places, self._runs[1:], names, SLICE)
        for number in range(STEPS):
            gradient = self._numbers(10.0 ** (number - 2))
            self._one_by_one(whole, ours, gradient)
            if not sliced.step([gradient.clone()]):
                return None
        sliced.tell()
        are_same = are_equal(*self._runs) and all(
            whole.state[one].keys() == pieces.state[other].keys()
            and all(are_equal(value, pieces.state[other][name]) for name, value in whole.state[one].items())
            for one, other in zip(ours, theirs, strict=True)
        )
        return names if are_same else None

    def _one_by_one(
        self, optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], gradient: torch.Tensor
    ) -> None:
        for parameter, part in zip(parameters, self._cut(gradient.clone()), strict=True):
            parameter.grad = part
        self._step(optimizer)

    def _numbers(self, scale: float) -> torch.Tensor:
        """Random ones where tensors lie, zeros between them."""
        run = torch.zeros(self._end, dtype=self._dtype)
        for view in self._cut(run):
            view.copy_(torch.randn(view.shape, generator=self._random) * scale)
        return run

    def _cut(self, run: torch.Tensor) -> list[torch.Tensor]:
        return [run[place.first : place.end].view(shape) for place, shape in zip(self._places, SHAPES, strict=True)]
