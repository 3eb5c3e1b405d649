"""What the user's code carries from one batch to the next in plain Python: counters, averages, lists, a teacher that is
no part of the model. Found by a look before and after; and whether it matters is tried, by giving it other values, or
the ones that it had in the beginning. A counter for the log is harmless, one that decides about the loss is not.
"""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from wide.job.picture import picture
from wide.job.reach import Place, line_of, reach

LATER = (0, 1, 3, 7, 15, 25, 40, 70, 99, 100, 150, 300, 499, 500, 999, 1_000, 1_001, 2_500, 10_007, 10**5, 10**6)
MOST_NUMBERS = 40  # of the user's code, with their neighbours
FEW = 4  # items: no list of numbers, but numbers in a list
MANY = 10_000  # so long a list may become
LARGE_NBYTES = 64 << 20  # of one array: not copied
MOST_KEPT = 100_000  # items of a container that can be put back
MOST_SUSPECTS = 16
MOST_S = 3.0  # for trying one after the other
IN_PLACE = (list, deque, dict, set, torch.Tensor, np.ndarray)  # others may hold them too
PASSES = 3  # at so many moments something must have made no difference; what it is set to may depend on the weights
FIRST_LOOKS, SHARE = 10, 0.005  # how often state is looked at in training: at first, then for a part of the time

GONE = object()
Digest = Callable[[], Any]  # computes a batch, and gives something to compare; None: it failed


class Carried:
    """Made before any batch. `look` after some, and after more of them `culprit` says what matters of the changes."""

    def __init__(self, bound: Collection[tuple[int, str]] = (), **roots: Any) -> None:
        self._bound, self._roots = bound, roots
        self._found = reach(bound, **roots)
        self._at_first = {place.identity: _Kept(value) for place, value in self._values()}
        self._cached = {id(cache): cache.cache_info().currsize for cache in self._found.caches}
        self._passed: Counter[tuple[int, Any]] = Counter()  # how often it made no difference
        self._before: dict[Any, Any] = {}
        self._modes = self._training()
        self._looks, self._owed_s = 0, 0.0

    def look(self) -> None:
        self._found = reach(self._bound, **self._roots)
        self._before = {place.identity: picture(value) for place, value in self._values()}

    def has_news(self, compute_s: float) -> bool:
        """In training, after a lease that took so long: is something not as it was, that was never tried? Looked at for
        a small part of that time.
        """
        self._owed_s += SHARE * compute_s
        self._looks += 1
        if self._looks > FIRST_LOOKS and self._owed_s < 0:
            return False
        began = time.thread_time()  # of the processor: while another program has it, nothing is looked at
        changed = [place for place, value in self._values() if self._was_made(place, value)]
        self._owed_s -= time.thread_time() - began
        return any(self._passed[place.identity] < PASSES for place in changed) or self.has_switched

    @property
    def has_switched(self) -> bool:
        """Is a module in another mode than in the beginning?"""
        return self._training() != self._modes

    def culprit(self, first: Digest, expected: Any, other: Digest) -> str:
        """The name of something on which a batch's result depends, and that batches change: `model.calls (net.py:42)`.
        Empty if there is none, or if there is no telling. `first` computes the first batch, which gave `expected`;
        `other` another one, with other weights and another seed.
        """
        deadline = time.monotonic() + MOST_S
        made = [place for place, value in self._values() if self._was_made(place, value)]
        changing = [place for place in made if picture(_value(place)) != self._before.get(place.identity)]
        suspects = [place for place in changing if not self._passed[place.identity]]
        with _quietly():
            found = self._culprit(made, suspects, first, expected, other, deadline)
            if not found:
                found = self._cache(other)
        if not found:
            self._passed.update(place.identity for place in made)
        return found

    def _culprit(
        self, made: list[Place], suspects: list[Place], first: Digest, expected: Any, other: Digest, deadline: float
    ) -> str:
        if not made:
            return ""
        if first() != expected:
            return self._named(self._that_matters(made[:MOST_SUSPECTS], first, expected))
        for place in suspects[:MOST_SUSPECTS]:
            with contextlib.closing(_others(place, self._turning_points())) as others:
                for _ in others:
                    if first() not in (expected, None):
                        return self._named(place)
                    if time.monotonic() > deadline:
                        break
        usual = other()
        for place in made[:MOST_SUSPECTS]:
            with self._unmade([place]):
                if usual is not None and other() not in (usual, None):
                    return self._named(place)
        return ""

    def _turning_points(self) -> list[int]:
        """Values at which a counter may begin to matter: `if self.calls % 32 == 0`, `if calls > 400`. The code's own
        numbers tell, and those beside them, for it may count before it asks, or after.
        """
        numbers = sorted(number for number in self._found.numbers if 1 < number < 10**9)[:MOST_NUMBERS]
        return list(dict.fromkeys(near for number in numbers for near in (number - 1, number, number + 1)))

    def _cache(self, other: Digest) -> str:
        """A function that remembers what it once drew."""
        grown = [c for c in self._found.caches if c.cache_info().currsize > self._cached.get(id(c), 0)]
        if not grown or (usual := other()) is None:
            return ""
        for cache in grown[:MOST_SUSPECTS]:
            cache.cache_clear()
            if other() not in (usual, None):
                return f"what {getattr(cache, '__name__', 'a function')} remembers (functools.cache)"
        return ""

    def _that_matters(self, suspects: list[Place], first: Digest, expected: Any) -> Place | None:
        """If the first batch is what it was once all suspects are put back, it is the one for which that is enough, or
        at least one that must not be left out.
        """

        def helps(places: list[Place]) -> bool:
            with self._unmade(places):
                return bool(first() == expected)

        if not helps(suspects):
            return None
        enough = (place for place in suspects if helps([place]))
        needed = (place for place in suspects if not helps([other for other in suspects if other is not place]))
        return next(enough, None) or next(needed, None)

    def _was_made(self, place: Place, value: Any) -> bool:
        """Is it not what it was before the first batch?"""
        first = self._at_first.get(place.identity)
        return first is None or first.picture != picture(value)

    @contextlib.contextmanager
    def _unmade(self, places: list[Place]) -> Iterator[None]:
        """For a while these are as they were before the first batch."""
        now = [(place, _Kept(value)) for place in places if (value := _value(place)) is not GONE]
        for place, _ in now:
            if (first := self._at_first.get(place.identity)) is not None:
                first.put_back(place)
            elif isinstance(place.owner, dict):
                place.owner.pop(place.key, None)
        try:
            yield
        finally:
            for place, kept in now:
                kept.put_back(place)

    def _named(self, place: Place | None) -> str:
        if place is None:
            return ""
        line = line_of(place, self._found)
        return f"{place.name} ({line})" if line else place.name

    def _values(self) -> Iterator[tuple[Place, Any]]:
        for place in self._found.places:
            if (value := _value(place)) is not GONE:
                yield place, value

    def _training(self) -> list[bool]:
        model = self._roots.get("model")
        return [module.training for module in model.modules()] if isinstance(model, nn.Module) else []


class _Kept:
    """A value as it was."""

    def __init__(self, value: Any) -> None:
        self.picture, self._value = picture(value), value
        is_small = not isinstance(value, list | dict | set | deque) or len(value) <= MOST_KEPT
        self._copy = _copy(value) if isinstance(value, IN_PLACE) and is_small else None

    def put_back(self, place: Place) -> None:
        if self._copy is not None:
            _fill(self._value, self._copy)
        if not isinstance(place.owner, list):
            with contextlib.suppress(Exception):
                place.set(self._value)


def _value(place: Place) -> Any:
    try:
        return place.get()
    except Exception:
        return GONE


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """What the user's code prints while values are only tried is not for people."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _copy(value: Any) -> Any:
    """None, if it cannot be copied, or is data, most likely, of which a copy would cost more than it tells."""
    try:
        if isinstance(value, torch.Tensor | np.ndarray) and value.nbytes > LARGE_NBYTES:
            return None
        return value.detach().clone() if isinstance(value, torch.Tensor) else copy.copy(value)
    except Exception:
        return None


def _others(place: Place, turning_points: list[int]) -> Generator[None, None, None]:
    """Whenever it yields, another value is there; in the end it is the old one again."""
    value = _value(place)
    if isinstance(value, IN_PLACE):
        yield from _inside_out(value, turning_points)
        return
    others: list[Any] = []
    if isinstance(value, bool):
        others = [not value]
    elif isinstance(value, int):
        others = [value + 1, *turning_points, *LATER]
    elif isinstance(value, float | np.number):
        kind: Any = type(value)
        others = [kind(other) for other in (0, 0.5, 1, *turning_points, 1_000, 1_000_000)]
    elif isinstance(value, itertools.count):
        others = [itertools.count(later) for later in (*turning_points, *LATER)]
    try:
        for other in others:
            place.set(other)
            yield
    except Exception:  # it does not take them
        return
    finally:
        with contextlib.suppress(Exception):
            place.set(value)


def _inside_out(value: Any, turning_points: list[int]) -> Iterator[None]:
    """In place, for others may hold it too."""
    if (old := _copy(value)) is None:
        return
    try:
        if isinstance(value, torch.Tensor | np.ndarray):
            for other in (old * 0, old * 2 + 1) if old.dtype not in (torch.bool, np.dtype(bool)) else (~old,):
                if not _fill(value, other):
                    return
                yield
        else:
            if isinstance(value, list | deque) and 0 < len(old) <= FEW and all(type(item) is int for item in old):
                for other in (*turning_points, *LATER):  # a counter that a closure can change
                    _fill(value, [other] * len(old))
                    yield
            value.clear()
            yield
            if isinstance(value, list | deque) and old:
                value.extend(list(old) * max(0, MANY // len(old)))
                yield
    except TypeError:  # numbers that cannot be multiplied
        return
    finally:
        _fill(value, old)


def _fill(value: Any, other: Any) -> bool:
    """Did it take that?"""
    try:
        if isinstance(value, torch.Tensor | np.ndarray):
            with torch.no_grad():
                value[...] = other
            return True
        value.clear()
        value.extend(other) if isinstance(value, list | deque) else value.update(other)
    except Exception:
        return False
    return True
