"""Where in the run the user's code is at this moment (`wide.here()`), and what it tells of that (`wide.log`). Does not
import torch.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

from wide.errors import TrainingFailed

MOST_NAMES, MOST_CHARS = 64, 64  # of metrics

Logged = dict[str, tuple[float, float]]  # by name: the sum of what was logged, each times its samples; and of these


class Here(NamedTuple):
    """A place in a run: which update of the model, in which epoch, which batch of it; and of how many updates (None: it
    ends by time).
    """

    step: int
    epoch: int = 0
    batch: int = 0
    steps: int | None = None

    @property
    def progress(self) -> float:
        """From 0 towards 1."""
        if self.steps is None:
            raise TrainingFailed("wide.here().progress: this run ends by time, not after so many steps: give it steps")
        return self.step / self.steps


class _Now(threading.local):
    here: Here | None = None
    logged: dict[str, float] | None = None
    was_asked = False


_now = _Now()


def here() -> Here:
    """Where the run is: for curricula and warm-ups, inside loss, data set, collate and evaluate."""
    if _now.here is None:
        raise TrainingFailed(
            "wide.here() is for the job's loss, data set, collate, after_step and evaluate (but not for data that is "
            "read ahead: a stream)"
        )
    _now.was_asked = True
    return _now.here


def log(**values: Any) -> None:
    """Metrics of this batch, inside loss: of each, the step's mean over all samples is kept and shown."""
    if _now.logged is not None:
        for name, value in values.items():
            _now.logged[name] = _number(name, value)


def enter(place: Here) -> None:
    """From now on the user's code, in this thread, is there."""
    _now.here = place


def leave() -> None:
    """And now it is nowhere."""
    _now.here = _now.logged = None


@contextlib.contextmanager
def nowhere() -> Iterator[None]:
    """For a while: what is read ahead has no place of its own."""
    before, _now.here = _now.here, None
    try:
        yield
    finally:
        _now.here = before


def listen() -> dict[str, float]:
    """What is logged from now on, until this is called again, goes there."""
    _now.logged = {}
    _now.was_asked = False
    return _now.logged


def was_asked() -> bool:
    """Has the user's code asked where it is, since `listen`?"""
    return _now.was_asked


def weighted(values: dict[str, float], samples: float) -> Logged:
    if len(values) > MOST_NAMES:
        raise TrainingFailed(f"wide.log: {len(values)} metrics in one batch, at most {MOST_NAMES} are kept")
    return {name: (value * samples, samples) for name, value in values.items()}


def added(left: Logged, right: Logged) -> Logged:
    """In the order of the tree, so that means are the same from any pool."""
    both = dict(left)
    for name, (total, samples) in right.items():
        before = left.get(name)
        both[name] = (before[0] + total, before[1] + samples) if before is not None else (total, samples)
    return both


def _number(name: str, value: Any) -> float:
    if not name or len(name) > MOST_CHARS:
        raise TrainingFailed(f"wide.log: a metric's name has 1 to {MOST_CHARS} characters, got {name[:80]!r}")
    try:
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        raise TrainingFailed(f"wide.log({name}=…) takes a number, or a tensor with one, got {_kind(value)}") from None


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
