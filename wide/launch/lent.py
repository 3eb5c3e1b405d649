"""One node of a machine that is lent: this process, or a child of it. It leaves politely."""

from __future__ import annotations

import _thread
import functools
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType

from wide.errors import Interrupted, Left, OtherProgram, OtherSet, TrainingFailed, WideError
from wide.job.definition import Job
from wide.job.loading import load
from wide.job.place import place_of
from wide.launch.child import end_with_parent
from wide.launch.code import code_folder
from wide.launch.guard import Guard, Terms
from wide.launch.lending import LEAVE_S, OTHER_PROGRAM, OTHER_SET, Lent
from wide.launch.own_loops import Seat, run_script
from wide.launch.signals import on_signals, say_and_end
from wide.node.greeting import Identity, pick_device
from wide.node.membership import Membership, raise_for
from wide.telemetry.log import log, logging_to
from wide.transport.tcp import SILENCE_S


class LentNode:
    """A member of a pool that can be sent away by a signal."""

    def __init__(self, lent: Lent) -> None:
        device = pick_device(lent.device, lent.index)
        identity = Identity(lent.endpoint.credential, lent.name, os.getpid(), device)
        dial = functools.partial(lent.endpoint.dial, SILENCE_S)
        self._membership = Membership(dial, identity, lambda: _loaded(lent.job), lent.job, lent.workers)
        self._retry_s = lent.retry_s
        self.why = "it was told to leave"
        self.is_alone = True  # or a parent ends it, if it takes too long
        self.signals: list[int] = []

    def leave(self, number: int, frame: FrameType | None) -> None:
        """The first time politely, if there is work to be handed in; the second time at once."""
        self.signals.append(number)
        if len(self.signals) == 1:
            self._membership.leave(self.why)
        elif self.is_alone:
            say_and_end(number, "left the pool")

    def work(self) -> None:
        """To the end of the run. Raises Left, if it was sent away."""
        began = time.monotonic()
        try:
            stop = self._membership.last(self._retry_s)
            if not stop.exit_code:
                log.info("%s", stop.why)
        finally:
            if batches := self._membership.batches:
                seconds = time.monotonic() - began
                spent = f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
                samples = self._membership.samples
                log.info("this node gave %s batches (%s samples) in %s", f"{batches:,}", f"{samples:,}", spent)
        raise_for(stop)


def serve_here(lent: Lent, terms: Terms) -> None:
    """In this process."""
    if _loaded(lent.job).own_loop is not None:
        return _run_its_script(lent)
    node = LentNode(lent)

    def send_away() -> None:
        node.why = str(guard.why)
        if os.name == "posix":
            os.kill(os.getpid(), signal.SIGTERM)
        else:  # there that would be the end of it
            _thread.interrupt_main(signal.SIGTERM)

    guard = Guard(terms, send_away)
    before = on_signals(node.leave)
    try:
        with guard:
            node.work()
    except Left:
        raise guard.why or Interrupted("left the pool", node.signals[0]) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_its_script(lent: Lent) -> None:
    """The loop is the script's own. A signal ends it as it would by itself, but for a goodbye."""
    signals: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        on_signals(lambda number, frame: say_and_end(number, "left the pool"))
        raise SystemExit(128 + number)

    before = on_signals(leave)
    try:
        run_script(lent.job, Seat(lent.endpoint, lent.name, lent.retry_s))
    except TrainingFailed:
        if signals:
            raise Interrupted("left the pool", signals[0]) from None
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def serve_as_child(lent: Lent) -> None:
    """As one of several; the parent hears Ctrl-C, and passes it on as SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the process that it was forked from ignores it
    threading.Thread(target=end_with_parent, args=(LEAVE_S,), daemon=True).start()
    with logging_to(lent.log):
        try:
            if _loaded(lent.job).own_loop is not None:
                signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
                return run_script(lent.job, Seat(lent.endpoint, lent.name, lent.retry_s))
            node = LentNode(lent)
            node.is_alone = False
            signal.signal(signal.SIGTERM, node.leave)
            node.work()
        except Left:
            sys.exit(0)
        except OtherProgram:
            sys.exit(OTHER_PROGRAM)
        except OtherSet:
            sys.exit(OTHER_SET)
        except WideError as error:
            log.error("%s: %s", lent.name, error)
            sys.exit(error.exit_code)
    return None


def threads_of(spec: str) -> int:
    return _loaded(spec).threads


def _loaded(spec: str) -> Job:
    """The job; and nothing of another version of its code, which this process may have run before."""
    own, sent = place_of(spec).root, code_folder().resolve()
    for name, module in list(sys.modules.items()):
        parents = Path(getattr(module, "__file__", None) or "").parents
        if sent in parents and own not in parents:
            del sys.modules[name]
    others = (path for path in sys.path if sent not in Path(path).parents or own in (Path(path), *Path(path).parents))
    sys.path[:] = list(others)
    return load(spec)
