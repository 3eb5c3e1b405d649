"""One worker: a process, forked from its node, that fetches batches until its node is gone. Knows a data set and a
pipe; which batches, and when, is workers.py's business.

It shares the node's memory, so its data set is there already. What two processes cannot share, it has for itself: open
files get a position of their own; a data set that has connections or threads is opened anew; the node's own connections
are closed, or the coordinator would take a node for alive that is not.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import signal
import stat
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from wide.errors import TrainingFailed
from wide.job.loading import users_code
from wide.job.samples import Samples
from wide.node.parcel import send, wrap
from wide.transport.shared import IS_POSSIBLE

ARE_POSSIBLE = IS_POSSIBLE and hasattr(os, "fork")
PR_SET_PDEATHSIG = 1
FILES = "/proc/self/fd"
KEPT_FLAGS = os.O_RDONLY | os.O_WRONLY | os.O_RDWR | os.O_APPEND


class Failed(NamedTuple):
    """The user's code did."""

    words: str
    details: str


class NotSent(NamedTuple):
    """It was fetched, and cannot leave its process."""

    why: str


class Nursery(NamedTuple):
    """What a worker is made of: how it comes to its samples, torch threads as in its node, cores it may use."""

    samples: Callable[[], Samples]
    threads: int
    cores: set[int]


class Worker(NamedTuple):
    pid: int
    pipe: Connection


def own() -> set[str]:
    """What this process has that a forked one had better not use, too: connections, and threads."""
    if not ARE_POSSIBLE:
        return set()
    files = {os.readlink(f"{FILES}/{number}") for number, mode in _open_files() if _is_connection(mode)}
    return files | {f"thread {thread.ident}" for thread in threading.enumerate()}


def start(nursery: Nursery) -> Worker:
    """Raises OSError, where there is no room for another process. It begins when nothing is shared any more."""
    ours, theirs = Pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _be(theirs, parent, nursery)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os._exit(code)
    theirs.close()
    with contextlib.suppress(EOFError, OSError):  # whoever asks it for something will notice
        ours.recv_bytes()
    return Worker(pid, ours)


def _be(pipe: Connection, parent: int, nursery: Nursery) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are the node's business
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # gone in between
        return
    gc.freeze()  # the collector would write to every page that is shared
    _part(pipe.fileno())
    if nursery.cores:
        os.sched_setaffinity(0, nursery.cores)  # the node may have been given one of them
    pipe.send_bytes(b"")
    if nursery.threads == 1:
        _work(pipe, nursery)
    else:  # OpenMP's helpers did not survive the fork, and a new thread gets new ones
        thread = threading.Thread(target=_work, args=(pipe, nursery))
        thread.start()
        thread.join()


def _part(pipe: int) -> None:
    """From the node: no connection of its, and no file's position, is this process's too."""
    for number, mode in list(_open_files()):
        if number > 2 and number != pipe and _is_connection(mode):
            os.close(number)
        elif number > 2 and stat.S_ISREG(mode):
            _open_again(number)


def _open_again(number: int) -> None:
    """At the place where it was. Rather closed than moved about by others."""
    import fcntl  # not on Windows

    place = os.lseek(number, 0, os.SEEK_CUR)
    try:
        again = os.open(f"{FILES}/{number}", fcntl.fcntl(number, fcntl.F_GETFL) & KEPT_FLAGS)
    except OSError:
        os.close(number)
        return
    os.lseek(again, place, os.SEEK_SET)
    os.dup2(again, number, inheritable=False)
    os.close(again)


def _open_files() -> Iterator[tuple[int, int]]:
    """Their numbers and kinds."""
    for number in map(int, os.listdir(FILES)):
        with contextlib.suppress(OSError):
            yield number, os.fstat(number).st_mode


def _is_connection(mode: int) -> bool:
    return stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)


def _work(pipe: Connection, nursery: Nursery) -> None:
    torch.set_num_threads(nursery.threads)
    samples: Samples | None = None
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the node has closed it
        while True:
            ids, where = pickle.loads(pipe.recv_bytes())
            answer: Any
            try:
                with users_code("computing the loss and its gradient failed"):  # as without workers
                    samples = samples or nursery.samples()
                    answer = samples.batch(torch.frombuffer(bytearray(ids), dtype=torch.int64), *where)
            except TrainingFailed as error:
                answer = Failed(str(error), error.details)
            _answer(pipe, answer)


def _answer(pipe: Connection, answer: Any) -> None:
    try:
        parcel = wrap(answer)
    except Exception as error:
        parcel = wrap(NotSent(f"{type(error).__name__}: {error}".split("\n")[0]))
    try:
        send(pipe, parcel)
    except (BrokenPipeError, ConnectionResetError):
        raise
    except OSError as error:
        why = f"a worker found no memory for a batch of {parcel.starts[-1] >> 20} MB ({error.strerror})"
        send(pipe, wrap(Failed(f"{why}: use fewer workers, or workers=0", "")))
