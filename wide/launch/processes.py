"""Child processes on this machine: started quickly, watched, and never left behind. Does not import torch.

Linux forks them from a server that has torch loaded: ten nodes are up in about a second and share most memory.
Elsewhere (macOS frameworks do not survive a fork, Windows has none) each child is spawned afresh.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess

from wide.job import isa
from wide.launch.environment import add_wishes
from wide.launch.signals import signals_held

HAS_FORKSERVER = sys.platform not in ("darwin", "win32")
JOB_VARIABLE = "WIDE_WARM_JOB"
CONTEXT = multiprocessing.get_context("forkserver") if HAS_FORKSERVER else multiprocessing.get_context("spawn")
GRACE_S = 3.0
_main_lock = threading.Lock()
_told: dict[str, str | None] = {}  # what the server's environment says of instruction sets


def warm_up(job_spec: str = "") -> None:
    """Begin to load torch and the job's file where children will be forked from; returns at once. A server that was
    told of another instruction set is of no use any more.
    """
    global _told
    if HAS_FORKSERVER:
        told = {name: os.environ.get(name) for name in isa.VARIABLES}
        if _told and told != _told:
            forkserver._forkserver._stop()  # type: ignore[attr-defined]
        _told = told
        CONTEXT.set_forkserver_preload(["wide.launch.warm"])
        os.environ[JOB_VARIABLE] = job_spec
        added = add_wishes(os.environ)
        try:
            with signals_held():
                forkserver.ensure_running()
        finally:
            for name in (JOB_VARIABLE, *added):
                del os.environ[name]


class Children:
    """The child processes of one run."""

    def __init__(self, may_fork: bool = True) -> None:
        self._processes: list[BaseProcess] = []
        self._may_fork = may_fork  # from this process, and not only from the server

    def start(self, module: str, function: str, *arguments: object, may_have_children: bool = False) -> BaseProcess:
        """Call `function` of `module` in a new process; the module is imported there, not here."""
        process = _process_class(self._may_fork)(
            target=_call, args=(module, function, *arguments), daemon=not may_have_children
        )
        with _main_left_alone():
            process.start()
        self._processes.append(process)
        return process

    @property
    def have_begun(self) -> bool:
        return bool(self._processes)

    @property
    def are_all_gone(self) -> bool:
        return not any(process.is_alive() for process in self._processes)

    def exit_codes(self) -> list[int | None]:
        return [process.exitcode for process in self._processes]

    def join(self) -> None:
        """Until all have ended by themselves."""
        for process in self._processes:
            process.join()

    def terminate(self) -> None:
        """Ask them to end."""
        for process in self._processes:
            process.terminate()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def stop(self, grace_s: float) -> None:
        """Give them `grace_s` to end by themselves, then end them."""
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.terminate()
        for process in self._processes:
            process.join(GRACE_S)
            if process.is_alive():
                process.kill()
                process.join()


def _process_class(may_fork: bool) -> type[BaseProcess]:
    """A process that was itself forked from the warm server forks its own children, as long as it has no threads and
    has not touched a GPU.
    """
    cuda = getattr(sys.modules.get("torch"), "cuda", None)  # where it is in use already, it does not survive a fork
    is_forkable = threading.active_count() == 1 and not (cuda is not None and cuda.is_initialized())
    is_warm = may_fork and HAS_FORKSERVER and multiprocessing.parent_process() is not None and is_forkable
    return multiprocessing.get_context("fork").Process if is_warm else CONTEXT.Process


def _call(module: str, function: str, *arguments: object) -> None:
    getattr(importlib.import_module(module), function)(*arguments)


@contextlib.contextmanager
def _main_left_alone() -> Iterator[None]:
    """multiprocessing would run the user's script again in every child; ours get the job itself and need no script."""
    with _main_lock:
        main = sys.modules["__main__"]
        kept = {name: getattr(main, name, None) for name in ("__file__", "__spec__")}
        for name in kept:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in kept.items():
                setattr(main, name, value)
