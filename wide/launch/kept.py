"""A node that an engine's worker keeps: one child process, the command `wide join`, which ends with the process that
keeps it. Knows commands and exit codes; knows no engine, and runs on the engine's machines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import NamedTuple

from wide import __version__
from wide.launch.engines import NEVER_AGAIN
from wide.launch.visit import VARIABLE
from wide.telemetry.log import without_invites

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # before a node that has failed is started again
LEAVE_S = 10.0  # for a node to hand in what it has
# The child binds itself to the process that starts it, and only then becomes the command: nothing of ours runs between
# fork and exec, in a process that has threads. The kernel looks at the thread, which therefore waits for its child.
BOUND = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.getppid() == int(sys.argv[1]) or os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class Versions(NamedTuple):
    """What a machine of the engine's would compute with."""

    host: str
    wide: str
    torch: str
    python: str

    def differing(self, others: Versions) -> str:
        """One line about how this machine differs from the coordinator's; empty, if it does not."""
        pairs = [
            (f"{name} {mine}", f"{name} {theirs}")
            for name, mine, theirs in zip(self._fields[1:], self[1:], others[1:], strict=True)
            if mine != theirs
        ]
        mine, theirs = (", ".join(words) for words in zip(*pairs, strict=True)) if pairs else ("", "")
        return (
            f"{self.host} has {mine}; the coordinator {theirs}: it may be refused, or round differently"
            if pairs
            else ""
        )


class Ended(NamedTuple):
    """How a node's process ended: on which machine, its exit code, and what it said last."""

    host: str
    code: int
    words: str


class Next(NamedTuple):
    """What follows from that: is it started again, after which pause, and what is there to tell?"""

    is_again: bool
    pause_s: float = 0.0
    told: str = ""


def after(ended: Ended, name: str, failures: int) -> Next:
    """`failures`: how often it ended so before, without an end of the run."""
    why = f"{name} on {ended.host} ended with exit code {ended.code}" + (f": {ended.words}" if ended.words else "")
    if ended.code == 0:
        return Next(False)
    if ended.code in NEVER_AGAIN:
        return Next(False, 0.0, f"{why}; it is not started again")
    pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(failures, 10))
    return Next(True, pause_s, "" if failures else f"{why}; it is started again")


def versions() -> Versions:
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return Versions(socket.gethostname(), __version__, torch, platform.python_version())


def bound(words: Sequence[str]) -> list[str]:
    """The command, such that it dies with the thread that starts it, where the system can do that."""
    if sys.platform != "linux":
        return list(words)
    return [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), *words]


class KeptNode:
    """One node at a time; `work` and `leave` may be called from different threads."""

    def __init__(self, words: Sequence[str], invite: str, folder: str) -> None:
        self._words, self._invite, self._folder = words, invite, folder
        self._child: subprocess.Popen[str] | None = None
        self.leaving = threading.Event()

    def work(self) -> Ended:
        """Until it ends. What it says goes where this process's words go, to the engine's logs."""
        child = subprocess.Popen(
            bound(self._words),
            env=os.environ | {VARIABLE: self._invite},
            cwd=folder_here(self._folder),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._child, last = child, ""
        if self.leaving.is_set():
            self.leave()
        assert child.stderr is not None
        with child:
            for line in child.stderr:
                words = without_invites(line.rstrip())
                print(words, file=sys.stderr, flush=True)
                last = words.strip() or last
        return Ended(socket.gethostname(), child.returncode, last.removeprefix("wide: "))

    def leave(self) -> None:
        """Politely; and then at once."""
        self.leaving.set()
        if (child := self._child) is not None and child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            timer = threading.Timer(LEAVE_S, child.kill)
            timer.daemon = True
            timer.start()


def folder_here(folder: str) -> str | None:
    """Where the caller stands, if this machine has that folder too: a job may open its data by relative paths."""
    return folder if os.path.isdir(folder) else None
