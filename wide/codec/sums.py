"""Sums over the memory of a flat buffer: whatever changes there shows, whoever changed it, and in whichever way."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from wide.codec.layout import Slot

STRETCH = 61  # words that are added up: so few that an order shows, and odd, so that a change of all signs does
SMALL_NBYTES = 256 << 10  # so much can always be looked at: 10 µs
QUICK_NBYTES = 2 << 20  # so much, too, if one look is enough: 50 µs
FIRST_LOOKS = 20  # at all of it, whatever that costs
SHARE = 0.01  # of the time, for looking at all of it later


class Sums:
    """`take` gives a number for each stretch; `names` are whose they are."""

    def __init__(self, raw: torch.Tensor, slots: Iterable[Slot]) -> None:
        is_here = raw.device.type == "cpu"
        self.is_small = is_here and len(raw) <= SMALL_NBYTES
        self.names: list[str] = []
        starts: list[int] = []
        end = 0
        for slot in sorted((slot for slot in slots if slot.nbytes), key=lambda slot: slot.offset):
            first, end = slot.offset // 8, -(-(slot.offset + slot.nbytes) // 8)
            step = 1 if self.is_small else STRETCH if is_here else end - first  # elsewhere each stretch is a call
            own = range(first, end, step)
            starts += own
            self.names += [slot.name] * len(own)
        words = raw.view(torch.int64)[:end]
        self.take = _copying(words, starts) if self.is_small else _summing(words, starts)

    def changed(self, before: np.ndarray, now: np.ndarray) -> list[str]:
        return list(dict.fromkeys(self.names[i] for i in np.flatnonzero(now != before)))


class Untouched:
    """Memory that nobody should change. `begin` before anybody could, `changed` after that; not every time all of it is
    looked at, if it is large: then what is found may have happened long ago (`is_late`).
    """

    def __init__(self, raw: torch.Tensor, slots: Sequence[Slot]) -> None:
        self._sums = Sums(raw, slots) if slots else None
        self._is_quick = sum(slot.nbytes for slot in slots) <= QUICK_NBYTES
        self._reference: np.ndarray | None = None
        self._looks, self._owed_s, self._asked_at = 0, 0.0, 0.0
        self.is_late = False

    def forget(self) -> None:
        """All of it is written anew."""
        self._reference = None

    def begin(self) -> None:
        if self._reference is None and self._sums is not None:
            self._reference = self._sums.take()
            self._asked_at = time.perf_counter()

    def changed(self) -> list[str]:
        """Whose memory is not as it was."""
        if self._sums is None or self._reference is None:
            return []
        began = time.perf_counter()
        self._owed_s += SHARE * (began - self._asked_at)
        self._asked_at = began
        if self._looks >= FIRST_LOOKS and self._owed_s < 0 and not self._is_quick:
            self.is_late = True
            return []
        self._looks += 1
        now = self._sums.take()
        found = [] if now.tobytes() == self._reference.tobytes() else self._sums.changed(self._reference, now)
        if self._looks > FIRST_LOOKS:
            self._owed_s = min(self._owed_s, 0.0) - (time.perf_counter() - began)
        return found


def _copying(words: torch.Tensor, starts: list[int]) -> Callable[[], np.ndarray]:
    return functools.partial(words.numpy().take, np.array(starts, dtype=np.intp))


def _summing(words: torch.Tensor, starts: list[int]) -> Callable[[], np.ndarray]:
    """What gives one number for each stretch, which a change of it would change."""
    if words.device.type == "cpu":
        return functools.partial(np.add.reduceat, words.numpy(), np.array(starts, dtype=np.intp))
    parts = [words[start:end] for start, end in zip(starts, [*starts[1:], len(words)], strict=True)]
    return lambda: torch.stack([part.sum() for part in parts]).cpu().numpy()
