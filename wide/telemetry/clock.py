"""The two clocks of a process: one that only goes forward, and the one on the wall. Whoever needs the time is given
one of these, so that a simulated world can have its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple


class Clock(NamedTuple):
    """`now` measures, in seconds from some moment on; `wall` is for people and for run.db."""

    now: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time


REAL = Clock()
