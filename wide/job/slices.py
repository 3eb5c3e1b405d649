"""An optimizer's step by slices of the flat buffer, instead of tensor by tensor: the same bits, where a number's step
follows from that number, its gradient and its state alone (elementwise.py). Knows torch's own optimizers; no training.

Small neighbours are stepped together, because each tensor costs a dozen calls. Large ones are stepped in pieces, which
stay in the cache while torch passes over them again and again, and which several threads share out (docs/findings.md).
"""

from __future__ import annotations

import copy
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from wide.job.hands import ONE, Hands

MOST = 1 << 18  # numbers in a slice: 1 MB of fp32
LEAST_SLICES = 8  # for each owner: to wake a thread for fewer takes longer than they do

Step = Callable[[torch.optim.Optimizer], Any]


class Place(NamedTuple):
    """Where a parameter's numbers lie: in which run of the flat buffer, and from where to where."""

    run: int
    first: int
    end: int


class Stretch(NamedTuple):
    """Neighbours in one run and one group of the optimizer; `members` are their places in the list of parameters."""

    group: int
    run: int
    first: int
    end: int
    members: list[int]

    def cut(self, most: int) -> list[slice]:
        return [slice(first, min(first + most, self.end)) for first in range(self.first, self.end, most)]


def stretches(places: Sequence[Place], groups: Sequence[int | None]) -> list[Stretch]:
    """Of all parameters that have a group; the others are not this optimizer's."""
    found: list[Stretch] = []
    for i, (place, group) in enumerate(zip(places, groups, strict=True)):
        last = found[-1] if found else None
        if group is None:
            continue
        if last is not None and last.members[-1] == i - 1 and (last.group, last.run) == (group, place.run):
            found[-1] = last._replace(end=place.end, members=[*last.members, i])
        else:
            found.append(Stretch(group, *place, [i]))
    return found


def owners_of(slices: int, hands: int) -> list[int]:
    """Who steps each of so many slices: neighbours have one owner, and owners equally many."""
    owners = max(1, min(hands, slices // LEAST_SLICES))
    return [i * owners // slices for i in range(slices)]


class Slices:
    """One optimizer's parameters, cut anew, with a copy of the optimizer for each owner of slices, which steps these.
    `elementwise` names what of its state is one number for each number: that lies in memory which the copies and the
    optimizer see. The rest, counters, is the copies' until `tell`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        step: Step,
        parameters: Sequence[torch.Tensor],
        places: Sequence[Place],
        runs: Sequence[torch.Tensor],
        elementwise: frozenset[str],
        most: int = MOST,
        hands: Hands = ONE,
    ) -> None:
        self._optimizer, self._step, self._elementwise, self._hands = optimizer, step, elementwise, hands
        self._parameters, self._places = parameters, places
        by_parameter = {id(p): n for n, group in enumerate(optimizer.param_groups) for p in group["params"]}
        found = stretches(places, [by_parameter.get(id(parameter)) for parameter in parameters])
        self._cuts = [
            (stretch, [(nn.Parameter(runs[stretch.run][part]), part) for part in stretch.cut(most)])
            for stretch in found
        ]
        pieces = [(stretch.group, piece) for stretch, cut in self._cuts for piece, _ in cut]
        owners = owners_of(len(pieces), hands.count)
        shares: list[list[list[nn.Parameter]]] = [[[] for _ in optimizer.param_groups] for _ in {0, *owners}]
        for (group, piece), owner in zip(pieces, owners, strict=True):
            shares[owner][group].append(piece)
        self._copies = [like(optimizer, share) for share in shares]
        self._copy_of = {p: each for each in self._copies for group in each.param_groups for p in group["params"]}
        self._kinds = self._settings()
        self._has_state = self._is_ahead = False

    def step(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Along these runs. False: not yet, because the parameters have no state, or not the same kinds of it; or not
        any more, because other kinds of it may come (a momentum that was 0).
        """
        if not (self._has_state or self._take_over()) or self._settings() != self._kinds:
            return False
        for stretch, pieces in self._cuts:
            for piece, part in pieces:
                piece.grad = gradients[stretch.run][part]
        for each in self._copies:
            for mine, its in zip(each.param_groups, self._optimizer.param_groups, strict=True):
                mine.update((name, value) for name, value in its.items() if name != "params")  # schedulers change them
        self._hands.do([functools.partial(self._step, each) for each in self._copies])
        self._is_ahead = True
        return True

    def tell(self) -> None:
        """The optimizer itself how many steps were made."""
        if self._is_ahead:
            self._is_ahead = False
            for stretch, pieces in self._cuts:
                counters = self._counters(self._copy_of[pieces[0][0]].state.get(pieces[0][0], {}))
                for i in stretch.members:
                    self._optimizer.state[self._parameters[i]].update(_copied(counters))

    def forget(self) -> None:
        """The optimizer was given another state."""
        self._has_state = self._is_ahead = False

    def _settings(self) -> list[dict[str, bool]]:
        """Which of the optimizer's settings are 0, or off."""
        groups = self._optimizer.param_groups
        return [{n: bool(value) for n, value in group.items() if n not in ("params", "lr")} for group in groups]

    def _counters(self, state: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in state.items() if name not in self._elementwise}

    def _take_over(self) -> bool:
        """The state moves to where both see it."""
        if not self._optimizer.state and self._elementwise:
            return False
        states = [[self._optimizer.state.get(self._parameters[i], {}) for i in s.members] for s, _ in self._cuts]
        if not all(self._are_alike(stretch, its) for (stretch, _), its in zip(self._cuts, states, strict=True)):
            return False
        for (stretch, pieces), its in zip(self._cuts, states, strict=True):
            count, first = stretch.end - stretch.first, its[0]
            memory = {name: first[name].new_zeros(count) for name in self._elementwise if name in first}
            for i, state in zip(stretch.members, its, strict=True):
                parameter, offset = self._parameters[i], self._places[i].first - stretch.first
                for name, numbers in memory.items():
                    view = numbers.as_strided(parameter.shape, parameter.stride(), offset)
                    state[name] = view.copy_(state[name])
            for piece, part in pieces:
                if first:
                    mine = slice(part.start - stretch.first, part.stop - stretch.first)
                    seen = {name: numbers[mine] for name, numbers in memory.items()}
                    self._copy_of[piece].state[piece] = seen | _copied(self._counters(first))
        self._has_state = True
        return True

    def _are_alike(self, stretch: Stretch, states: list[dict[str, Any]]) -> bool:
        """The same kinds of state, after the same number of steps?"""
        first = states[0]
        return all(
            state.keys() == first.keys()
            and all(_is_of(self._parameters[i], state[name], first[name]) for name in state.keys() & self._elementwise)
            and all(are_equal(value, first[name]) for name, value in self._counters(state).items())
            for i, state in zip(stretch.members, states, strict=True)
        )


def like(optimizer: torch.optim.Optimizer, parameters: Sequence[Sequence[nn.Parameter]]) -> torch.optim.Optimizer:
    """One of the same kind and with the same settings, for these parameters, without any state."""
    made = copy.copy(optimizer)
    made.state = defaultdict(dict)
    groups = zip(optimizer.param_groups, parameters, strict=True)
    made.param_groups = [{**group, "params": list(own)} for group, own in groups]
    return made


def are_equal(one: Any, other: Any) -> bool:
    """To the bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        is_alike = one.dtype == other.dtype and one.shape == other.shape
        return is_alike and torch.equal(*(t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
    return type(one) is type(other) and bool(one == other)


def _is_of(parameter: torch.Tensor, value: Any, first: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dtype == first.dtype


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
