"""`wide run` and `wide.run`: the user's own process. It starts the coordinator as a child, passes signals on to it, and
waits. Does not import torch for a pool, so that the children share the only copy there is.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import os
import signal
import sys
import threading
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec

from wide.config import Options, resolve
from wide.errors import BY_EXIT_CODE, Interrupted, TrainingFailed, UsageError, WideError
from wide.job.definition import Job
from wide.job.loading import find, load
from wide.launch.processes import CONTEXT, Children, warm_up
from wide.launch.result import Result, from_json


def run_file(spec: str, options: Options) -> Result:
    """`wide run FILE`. With nodes, the file is run by the children only; the result carries no model."""
    path, _ = find(spec)
    if options.node_count == 0:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
            return _run_here(load(spec), path.stem, options, path)
    return from_json(_run_in_child(spec, path.stem, options))


def plan_file(spec: str, options: Options) -> bytes:
    """`wide plan FILE`, as JSON."""
    path, _ = find(spec)
    return _run_in_child(spec, path.stem, msgspec.structs.replace(options, only_plans=True))


def run_job(job: Job, **given: Any) -> Result:
    """`wide.run(job, …)`, from a script or a notebook."""
    if not isinstance(job, Job):
        raise UsageError(f"wide.run needs a wide.Job, got {type(job).__name__}")
    options = resolve(given, os.environ)
    script = getattr(sys.modules["__main__"], "__file__", None)
    name = Path(script).stem if script else "notebook"
    if options.node_count == 0:
        return _run_here(job, name, options, Path(script) if script else None)
    result = from_json(_run_in_child(_pickled(job), name, options))
    from wide.store.weights import load_weights

    return replace(result, model=load_weights(job.model(), Path(result.run_dir)))


def _pickled(job: Job) -> bytes:
    """The job by value, lambdas included, just as it is now: nobody runs the user's script again."""
    import cloudpickle  # from a parent to its own child: the only place where this is allowed

    copyreg.dispatch_table[functools._lru_cache_wrapper] = _cached_function  # cloudpickle would send a name only
    try:
        pickled: bytes = cloudpickle.dumps(job)
    except Exception as error:
        raise UsageError(f"the job cannot be sent to node processes ({error}): put it into a file of its own") from None
    finally:
        del copyreg.dispatch_table[functools._lru_cache_wrapper]
    return pickled


def _cached_function(function: Any) -> Any:
    if function.__module__ != "__main__":
        return function.__qualname__
    return _cache_again, (function.cache_parameters(), function.__wrapped__)


def _cache_again(parameters: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _run_here(job: Job, name: str, options: Options, file: Path | None = None) -> Result:
    from wide.launch.training import Training

    return Training(job, name, options, sys.argv, file).train(crew=None)


def _run_in_child(job: str | bytes, name: str, options: Options) -> bytes:
    """The coordinator's answer."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    arguments = (job, name, options, list(sys.argv), not _is_own_stderr(), theirs)
    with _Signals() as signals:
        warm_up(job if isinstance(job, str) else "", nodes_optimize=options.strategy in ("local", "auto"))
        process = Children().start("wide.launch.child", "coordinate", *arguments, may_have_children=True)
        theirs.close()
        signals.pass_to(process.pid)
        answer = _answer(ours)
        process.join()
    if answer is not None and answer[0] == "result":
        words: str = answer[1]
        return words.encode()
    if signals.received:
        raise Interrupted(answer[2] if answer else "interrupted before training began", signals.received[0])
    if answer is None:
        words = f"the coordinator process ended unexpectedly (exit code {process.exitcode})"
        raise TrainingFailed(f"{words}: go on from its last checkpoint with --resume auto")
    _, exit_code, words, details = answer
    raise BY_EXIT_CODE.get(exit_code, WideError)(words, details)


def _answer(pipe: Connection) -> list[Any] | None:
    """What the coordinator says in the end; what it logs before that, where it cannot write to our stderr, is shown."""
    try:
        while True:
            said: list[Any] = msgspec.json.decode(pipe.recv_bytes())
            if said[0] != "log":
                return said
            sys.stderr.write(said[1])
    except EOFError:
        return None


def _is_own_stderr() -> bool:
    """Is sys.stderr what a child inherits? In a notebook, or under a test's capture, it is not."""
    try:
        return sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):
        return False


class _Signals:
    """Ctrl-C and SIGTERM are passed on to the coordinator, as SIGTERM, and this process waits for it to end.

    A second one ends the coordinator at once. The exit code tells which signal this process got.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pid: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere there can be no handlers
            numbers = (signal.SIGINT, signal.SIGTERM)
            self._before = {number: signal.signal(number, self._pass_on) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, pid: int | None) -> None:
        """From now on to this process, beginning with what came before it was there."""
        self._pid = pid
        if self.received:
            self._ask()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        self._ask()

    def _ask(self) -> None:
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)
