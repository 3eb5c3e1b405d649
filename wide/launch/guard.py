"""Does the owner of a machine that is lent want it back? By its clock, its memory, and what other programs use of it.
Knows the system's counters; knows no nodes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
import time
from collections.abc import Callable
from typing import Self

import msgspec
import psutil

from wide.errors import NotYet, Refused, WideError

LOOK_S = 1.0
BUSY_SHARE, BUSY_S, IDLE_S = 0.25, 5.0, 60.0  # others want so much of the cores, for so long; or no more, for so long
NICENESS = 10
UP = "the time is up for which this machine was lent"


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """On what terms a machine is lent."""

    nodes: int | None = 1  # None: as many as it has cores, or accelerators
    cores: int = 0  # at most; 0: all
    most_memory: int = 0  # bytes, of all its nodes together; 0: what they need
    until: float | None = None  # in seconds since 1970
    is_nice: bool = False
    only_idle: bool = False

    def take_a_back_seat(self) -> None:
        """What children inherit."""
        if self.cores and hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-self.cores :])
        if self.is_nice:
            with contextlib.suppress(OSError, psutil.Error):
                psutil.Process().nice(NICENESS if os.name == "posix" else psutil.IDLE_PRIORITY_CLASS)


class TimeIsUp(WideError):
    """The machine was lent until now."""

    exit_code = 0


class Busy(NotYet):
    """Others use the machine."""


class Guard:
    """Looks every second; `why` says why the nodes have to go, and then `send_away` is called, once."""

    def __init__(self, terms: Terms, send_away: Callable[[], None]) -> None:
        self._terms, self._send_away = terms, send_away
        self.why: WideError | None = None
        self._load, self._is_over = Load(), threading.Event()

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="guard", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while self.why is None and not self._is_over.wait(LOOK_S):
            self.why = self.look(time.time())
        if not self._is_over.is_set():
            self._send_away()

    def look(self, wall: float) -> WideError | None:
        terms = self._terms
        if terms.until is not None and wall >= terms.until:
            return TimeIsUp(UP)
        if terms.most_memory and (used := own_memory()) > terms.most_memory:
            return Refused(f"this machine's nodes use {used >> 20} MB, more than --max-memory allows")
        if terms.only_idle and self._load.is_wanted_by_others(time.monotonic()):
            return Busy("somebody else uses this machine")
        return None


class Load:
    """What all other programs use of the cores."""

    def __init__(self) -> None:
        self._before: tuple[float, float, float] | None = None
        self._since: float | None = None  # others want it

    def is_wanted_by_others(self, now: float) -> bool:
        share = self.share(now)
        if share is not None:
            self._since = (now if self._since is None else self._since) if share > BUSY_SHARE else None
        return self._since is not None and now - self._since >= BUSY_S

    def share(self, now: float) -> float | None:
        """Of all cores, since the last time; None, the first time."""
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        busy_s, own_s = sum(times) - idle_s, own_cpu_s()
        before, self._before = self._before, (now, busy_s, own_s)
        if before is None or now - before[0] < LOOK_S / 2:
            return None
        others_s = max(0.0, (busy_s - before[1]) - (own_s - before[2]))
        return float(others_s / (now - before[0]) / (psutil.cpu_count() or 1))


def wait_until_idle(terms: Terms) -> None:
    """Or until there is no more time for which the machine is lent."""
    load, since = Load(), time.monotonic()
    while time.monotonic() - since < IDLE_S:
        threading.Event().wait(LOOK_S)
        if terms.until is not None and time.time() >= terms.until:
            raise TimeIsUp(UP)
        if (share := load.share(time.monotonic())) is not None and share > BUSY_SHARE:
            since = time.monotonic()


def own_memory() -> int:
    return int(sum(_of_each(lambda process: process.memory_info().rss)))


def own_cpu_s() -> float:
    return sum(_of_each(lambda process: sum(process.cpu_times()[:2])))


def _of_each(value: Callable[[psutil.Process], float]) -> list[float]:
    """Of this process and all that it started."""
    me, found = psutil.Process(), []
    for process in (me, *me.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            found.append(value(process))
    return found


def until_of(text: str, now: datetime.datetime) -> float:
    """HH:MM of today, or of tomorrow if that is over. Raises ValueError."""
    hours, minutes = (int(part) for part in text.split(":"))
    then = now.replace(hour=hours, minute=minutes, second=0, microsecond=0)
    return (then if then > now else then + datetime.timedelta(days=1)).timestamp()
