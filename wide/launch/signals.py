"""Ctrl-C and SIGTERM: any number of them, at any moment, end a run once, and safely. Does not import torch.

Before training began there is nothing to lose: a process of our own says so, and ends on the spot, whatever the user's
code is doing. From then on the first signal asks the run to stop, and it stops with a checkpoint.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)
PATIENCE_S = 10.0  # whoever asks again after this long does not want to wait for the user's code any more
PR_SET_PDEATHSIG = 1
BEFORE = "interrupted before training began"
STARTER = "WIDE_STARTER"  # in the environment: the id of the process that starts another one


def on_signals(handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> dict[int, Any]:
    """The handlers that there were before. Only a main thread may have any."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {number: signal.signal(number, handler) for number in SIGNALS}


def end_here(number: int, frame: FrameType | None) -> None:
    """A command that has not begun anything."""
    say_and_end(number, BEFORE)


def say_and_end(number: int, why: str) -> NoReturn:
    with contextlib.suppress(OSError):
        os.write(2, f"wide: {why}\n".encode())
    os._exit(128 + number)


def end_with_starter(starter: int) -> None:
    """Should whoever started this process be killed, it is asked to end, too: by the kernel, where that does so. If its
    id is known, and it is gone already, at once.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if starter and os.getppid() != starter:
            os._exit(128 + signal.SIGTERM)


@contextlib.contextmanager
def stopping(stop: Callable[[str], None], received: list[int]) -> Iterator[None]:
    """While the block runs, the first signal asks for a stop. What came is put into `received`."""
    asked_at = 0.0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if received and time.monotonic() - asked_at > PATIENCE_S:
            raise KeyboardInterrupt
        asked_at = asked_at or time.monotonic()
        received.append(number)
        stop("stopped by a signal")

    before = on_signals(handler)
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """What comes while the block runs, comes after it; and processes that are started in it begin in peace."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
