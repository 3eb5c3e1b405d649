"""`wide run` and `wide.run`: the user's own process. It starts the coordinator as a child, passes signals on to it, and
waits. Does not import torch for a pool, so that the children share the only copy there is.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import FrameType
from typing import Any, Self

import msgspec

from wide.config import Options, resolve
from wide.dashboard.progress import counted
from wide.dashboard.terminal import FIRST_S, PIPED_S, Display, Screen, has_screen
from wide.errors import BY_EXIT_CODE, Interrupted, TrainingFailed, UsageError, WideError
from wide.job.definition import Job
from wide.job.isa import Isa
from wide.job.loading import check_not_importing, load, make, values_of
from wide.job.place import located
from wide.job.spec import PYTHON, TOLD, Given, split_spec, title_of
from wide.job.values import Function, Values, is_function
from wide.launch.folder import found_before, found_run, remembered_set, remembered_spec
from wide.launch.instructions import chosen, for_children, obey
from wide.launch.processes import CONTEXT, Children, warm_up
from wide.launch.relay import seen
from wide.launch.result import Result, from_json
from wide.launch.signals import on_signals, say_and_end

ASK_AGAIN_S = 1.0
MANY = 500  # words that are shown at once


def run_file(spec: str, options: Options) -> Result:
    """`wide run FILE`. With nodes, the file is run by the children only; the result carries no model."""
    spec = remembered_spec(located(spec), options)
    path, _ = split_spec(spec)
    name = title_of(path)
    wanted = chosen(options, found_run(spec, options))
    obey(wanted, options.log != "silent")
    _first_words(path.name, options)
    if options.node_count == 0:
        from wide.job.compiler import put_off

        put_off()
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for the result alone
            job = load(spec)
            return _run_here(job, name, options, spec, is_python=False, values=values_of(spec))
    return from_json(_run_in_child(spec, name, options))


def plan_file(spec: str, options: Options) -> bytes:
    """`wide plan FILE`, as JSON."""
    spec = located(spec)
    obey(chosen(options, None), options.log != "silent")
    return _run_in_child(spec, title_of(split_spec(spec)[0]), msgspec.structs.replace(options, only_plans=True))


def run_job(what: Job | Function, values: Mapping[str, Any] | None, **given: Any) -> Result:
    """`wide.run(job, …)`, from a script or a notebook."""
    check_not_importing()
    _check_contexts()
    options = resolve(given, os.environ)
    if options.on != "local":
        raise UsageError(
            f"wide.run(on={options.on!r}): an engine's machines need the job as a file: wide run FILE --on …"
        )
    script = getattr(sys.modules["__main__"], "__file__", None)
    name = Path(script).stem if script else _name_of(what)
    job, made_with = _made(what, values, lambda: remembered_set(name, script, options))
    if job.own_loop is not None:
        raise UsageError(
            "wide.run: this job's loop stands in a script, which nodes have to run: `wide run FILE` does that"
        )
    wanted = chosen(options, found_before(name, script, options))
    _first_words(name, options)
    if options.node_count == 0:
        obey(wanted)
        result = _run_here(job, name, options, script or "", is_python=True, values=made_with)
    else:
        with _pickled(msgspec.structs.replace(job, finish=None), made_with) as words:
            told = from_json(_run_in_child(words, name, options, script or "", wanted))
        from wide.store.weights import load_weights

        model = load_weights(job.model(), Path(told.run_dir))
        result = replace(told, build=lambda: model)
    if job.finish is not None:
        job.finish(result)
    return result


def _made(what: object, values: Mapping[str, Any] | None, before: Callable[[], Values]) -> tuple[Job, Values]:
    """The job, and the values that it was made with, if a function makes it. A run that goes on has those it had."""
    if isinstance(what, Job):
        if values:
            raise UsageError("wide.run(job, set=…): this job is made already; give the function that makes it")
        return what, {}
    if not is_function(what):
        raise UsageError(f"wide.run needs a wide.Job, or a function that returns one, got {type(what).__name__}")
    if not isinstance(values or {}, Mapping) or not all(isinstance(name, str) for name in values or {}):
        raise UsageError('wide.run(…, set=…): expected names and values, such as {"lr": 0.3}')
    given = {name: Given(value, TOLD) for name, value in before().items()}
    given |= {name: Given(value, PYTHON) for name, value in (values or {}).items()}
    return make(what, given)


def _name_of(job: object) -> str:
    """In a notebook: what the user calls it there."""
    named = (name for name, value in vars(sys.modules["__main__"]).items() if value is job and name[0] != "_")
    return next(named, "notebook")


def _check_contexts() -> None:
    """What is switched on around the call would reach one process, and not the others."""
    if (torch := sys.modules.get("torch")) is not None:
        is_on = {
            "torch.no_grad()": not torch.is_grad_enabled(),
            "torch.inference_mode()": torch.is_inference_mode_enabled(),
            "torch.autocast()": torch.is_autocast_enabled() or torch.is_autocast_enabled("cpu"),
        }
        for name in [name for name, value in is_on.items() if value]:
            raise UsageError(f"wide.run was called within {name}: call it outside, and use that within the loss")


def _first_words(name: str, options: Options) -> None:
    """Before anything that takes a while, for whoever looks at a screen: loading torch takes seconds."""
    if options.log != "silent" and (sys.stderr.isatty() or "ipykernel" in sys.modules):
        where = "in this process" if options.node_count == 0 else f"on {counted(options.node_count, 'node')}"
        print(f"wide: training {name} {where}; loading torch and the job …", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _pickled(job: Job, values: Values) -> Iterator[bytes]:
    """The job by value, lambdas included, just as it is now: nobody runs the user's script again."""
    from wide.launch.sent import sent  # cloudpickle is for those who need it

    copyreg.dispatch_table[functools._lru_cache_wrapper] = _cached_function  # cloudpickle would send a name only
    with contextlib.ExitStack() as stack:
        try:
            words = stack.enter_context(sent((_settings(), job, values)))
        except Exception as error:
            why = f"the job cannot be sent to node processes ({error})"
            raise UsageError(f"{why}: put it into a file of its own") from None
        finally:
            del copyreg.dispatch_table[functools._lru_cache_wrapper]
        yield words


def _settings() -> dict[str, Any]:
    """torch's global ones, as the script has made them; if it has not imported torch, they are torch's own."""
    if "torch" not in sys.modules:
        return {}
    from wide.job.settings import settings

    return settings()


def _cached_function(function: Any) -> Any:
    if function.__module__ != "__main__":
        return function.__qualname__
    return _cache_again, (function.cache_parameters(), function.__wrapped__)


def _cache_again(parameters: dict[str, Any], function: Any) -> Any:
    return functools.lru_cache(**parameters)(function)


def _run_here(job: Job, name: str, options: Options, spec: str, is_python: bool, values: Values) -> Result:
    from wide.launch.training import Origin, Training

    origin = Origin(sys.argv, spec, is_python, None if is_python else say_and_end, values=values)
    return Training(job, name, options, origin).train(None)


def _run_in_child(job: str | bytes, name: str, options: Options, script: str = "", wanted: Isa | None = None) -> bytes:
    """The coordinator's answer. `wanted`: the instruction set of its processes, if it is not this one's."""
    ours, theirs = CONTEXT.Pipe(duplex=False)
    spec = job if isinstance(job, str) else script
    display = _display(options)
    spoken = CONTEXT.Pipe(duplex=False) if display is not None or not _is_own_stderr() else None
    shown = CONTEXT.Pipe(duplex=False) if display is not None else None
    theirs_too = [pipe[1] if pipe is not None else None for pipe in (spoken, shown)]
    arguments = (job, name, options, list(sys.argv), spec, theirs, *theirs_too)
    with _Signals() as signals, contextlib.ExitStack() as stack:
        with for_children(wanted):
            warm_up(job if isinstance(job, str) else "")
            process = Children().start("wide.launch.child", "coordinate", *arguments, may_have_children=True)
        for end in (theirs, *theirs_too):
            if end is not None:
                end.close()
        signals.pass_to(process.pid)
        ears, eyes = (pipe[0] if pipe is not None else None for pipe in (spoken, shown))
        hearing = Hearing(ears, eyes, display, stack)
        answer = _answer(ours, hearing, signals.ask_again, options.log != "silent")
        process.join()
    if answer is not None and answer[0] == "result":
        words: str = answer[1]
        return words.encode()
    if signals.received:
        words = answer[2] if answer else "interrupted, and the coordinator is gone; go on from its last checkpoint"
        raise Interrupted(words, signals.received[0])
    if answer is None:
        words = f"the coordinator process ended unexpectedly (exit code {process.exitcode})"
        raise TrainingFailed(f"{words}: go on from its last checkpoint with --resume auto")
    _, exit_code, words, details = answer
    if exit_code > 128:
        raise Interrupted(words, exit_code - 128)  # somebody stopped the coordinator itself
    raise BY_EXIT_CODE.get(exit_code, WideError)(words, details)


def _answer(pipe: Connection, hearing: Hearing, look_up: Callable[[], None], tells: bool) -> list[Any] | None:
    """What the coordinator says in the end; what it says before that, where its own stderr is not ours, is shown."""
    began, due_s = time.monotonic(), FIRST_S if tells else math.inf
    looked_at = began
    try:
        while True:
            ready = wait([pipe, *hearing.pipes], ASK_AGAIN_S)
            hearing.hear()
            if (now := time.monotonic()) - looked_at >= ASK_AGAIN_S:
                looked_at = now
                look_up()
            if (waited_s := time.monotonic() - began) > due_s:
                due_s += PIPED_S
                print(f"wide: still loading torch and the job ({waited_s:.0f} s)", file=sys.stderr, flush=True)
            if pipe not in ready:
                continue
            answer: list[Any] = msgspec.json.decode(pipe.recv_bytes())
            due_s = math.inf  # whatever it is, it has begun
            if answer[0] != "loaded":
                return answer
    except EOFError:
        return None
    finally:
        while hearing.hear():
            pass


class Hearing:
    """What a coordinator says that has no stderr of its own here: words, and pictures for the display, if any."""

    def __init__(
        self, words: Connection | None, screen: Connection | None, display: Display | None, stack: contextlib.ExitStack
    ) -> None:
        self.pipes = [pipe for pipe in (words, screen) if pipe is not None]
        self._screen, self._display, self._stack, self._is_shown = screen, display, stack, False

    def hear(self) -> bool:
        """What was said until now, if it is not too much at once. Was there anything?"""
        is_any = False
        for pipe in list(self.pipes):
            said: list[bytes] = []
            try:
                while len(said) < MANY and pipe.poll():
                    said.append(pipe.recv_bytes())
            except (EOFError, OSError):
                self.pipes.remove(pipe)
                pipe.close()
            if said:
                is_any = True
                with contextlib.suppress(OSError, ValueError):  # a screen that is gone, a disk that is full
                    self._look(said[-1]) if pipe is self._screen else self._write(b"".join(said))
        return is_any

    def _look(self, said: bytes) -> None:
        if self._display is not None:
            if not self._is_shown:
                self._stack.enter_context(self._display)
                self._is_shown = True
            self._display.show(*seen(said))

    def _write(self, said: bytes) -> None:
        stream: Any = self._display if self._is_shown and self._display is not None else sys.stderr
        stream.write(said.decode(errors="replace"))
        stream.flush()


def _display(options: Options) -> Display | None:
    """Where this process can show more than lines."""
    if options.log == "silent" or options.only_plans:
        return None
    if "ipykernel" in sys.modules and not options.plain:
        from wide.dashboard.notebook import Cell

        return Cell()
    return Screen() if _is_own_stderr() and has_screen(sys.stderr, options.plain) else None


def _is_own_stderr() -> bool:
    """Is sys.stderr what a child inherits? In a notebook, or under a test's capture, it is not."""
    try:
        return sys.stderr.fileno() == 2
    except (OSError, ValueError, AttributeError):
        return False


class _Signals:
    """Ctrl-C and SIGTERM are passed on to the coordinator, as SIGTERM, and this process waits for it to end. The exit
    code tells which signal this process got first.
    """

    def __init__(self) -> None:
        self.received: list[int] = []
        self._pid: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = on_signals(self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, pid: int | None) -> None:
        """From now on to this process, beginning with what came before it was there."""
        self._pid = pid
        self.ask_again()

    def ask_again(self) -> None:
        """It may not have been able to hear it yet."""
        if self._pid is not None and self.received:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self.received.append(number)
        if len(self.received) == 1:
            self.ask_again()  # and once a second from then on
