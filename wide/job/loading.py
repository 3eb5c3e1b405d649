"""From a spec (`file.py`, `file.py:name`, and what the job is told) to a Job. Runs the user's file as Python would, and
the function in it that makes the job, if it is one; knows nothing of pools.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import stat
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path

from wide.errors import TrainingFailed, UsageError, WideError
from wide.job.definition import Job
from wide.job.kinds import plain
from wide.job.place import Place, located, place_of
from wide.job.script import Entered, has_local, run_as_main
from wide.job.spec import TEXT, Given, arguments_of, parts, split_spec, values_in, written
from wide.job.values import Filling, Function, Values, is_function, line_of, name_of

GUARD = 'if __name__ == "__main__":'
_importing: list[Path] = []  # files that are being imported right now
_loaded: dict[Path, object] = {}  # so that a process forked from a warm parent need not run the file again
_made: dict[tuple[object, ...], tuple[Job, Values]] = {}  # nor the function
_runs_again: set[str] = set()  # unless it must: these modules it brought along
_ran_in = 0  # the process in which that was so last


def load(spec: str) -> Job:
    """Import the job's file and return the Job it names, or say in one line why that cannot be done."""
    spec = located(spec)
    path, place = split_spec(spec)[0], place_of(spec)
    try:
        module = _module(place, arguments_of(spec))
    except Entered as entered:  # its loop is not guarded
        _made[_key(spec)] = entered.job, {}
        return entered.job
    if (key := _key(spec)) not in _made:
        found = getattr(module, place.name, None)
        if found is None and has_local(place.path):
            with _running(place.path, arguments_of(spec)):
                found = _before_its_loop(place)
        if is_function(found):
            with _running(place.path, arguments_of(spec)):
                _made[key] = make(found, values_in(spec), str(path), place.name)
        else:
            _made[key] = _ready(found, spec, module), {}
    return _made[key][0]


def _ready(job: object, spec: str, module: object) -> Job:
    """A job that is there already; or what is there instead."""
    path, name = split_spec(spec)
    if not isinstance(job, Job):
        others = [key for key, value in vars(module).items() if isinstance(value, Job) or _makes_job(value, module)]
        hint = f"; it has {', '.join(others)}: say {path}:{others[0]}" if others else f"; write `{name} = wide.Job(…)`"
        raise UsageError(f"{path}: there is no wide.Job called {name!r} in it{hint}")
    if typed := {key: one.value for key, one in values_in(spec).items() if one.how == TEXT}:
        write = f"write `def {name}({next(iter(typed))}=…): return wide.Job(…)`"
        raise UsageError(f"--set {written(typed)}: {name} in {path} is a wide.Job, not a function: {write}")
    return job


def _before_its_loop(place: Place) -> Job:
    """What a script trains by wide.local: it is run until it comes there."""
    try:
        run_as_main(place)
    except Entered as entered:
        return entered.job
    except (Exception, SystemExit) as error:
        why = describe(error, place.path)
        raise UsageError(
            f"{place.path}: it ended before it came to wide.local: {why}", traceback.format_exc()
        ) from None
    raise UsageError(f"{place.path}: it ended before it came to wide.local(…), and has no wide.Job")


def _makes_job(value: object, module: object) -> bool:
    """A function of that module's own which says so."""
    is_own = is_function(value) and getattr(value, "__module__", None) == getattr(module, "__name__", "")
    return is_own and getattr(value, "__annotations__", {}).get("return") in (Job, "Job", "wide.Job")


def values_of(spec: str) -> Values:
    """What the function of a job that was loaded was called with, defaults included, as JSON has it."""
    return dict(_made.get(_key(spec), (None, {}))[1])


def _key(spec: str) -> tuple[object, ...]:
    place = place_of(spec)
    return place.path, place.name, parts(spec).values


def make(function: Function, given: Mapping[str, Given], where: str = "", name: str = "") -> tuple[Job, Values]:
    """Call a function that makes a job: the job, and all values that it was made with, defaults included. It is in this
    file, and called so there; or Python has it, and says `set=`.
    """
    file, line = line_of(function)
    place, name = f"{file.name}:{line}", name or name_of(function)
    filling = Filling(function, where or place, name, "--set" if where else "set=")
    values = filling.fill(given)
    by_place, by_name = filling.split(values)
    try:
        job = function(*by_place, **by_name)
    except WideError:
        raise
    except (Exception, SystemExit) as error:
        words = f"{where or place}: {name}({written(values)}) failed: {describe(error, file)}"
        raise UsageError(words, traceback.format_exc()) from None
    if not isinstance(job, Job):
        kind = "nothing" if job is None else f"a {type(job).__name__}"
        raise UsageError(f"{place}: {name}() returned {kind}: return wide.Job(…)")
    return job, {name: plain(value) for name, value in values.items()}


def load_ahead(spec: str) -> None:
    """In a process that others are forked from. Files that it opened would have one position for all of them, and
    threads do not survive a fork: where there are any, each process runs the file again.
    """
    global _ran_in
    before, modules = _open_files(), set(sys.modules)
    load(spec)
    if _open_files() - before or threading.active_count() > 1:
        _runs_again.update(name for name in set(sys.modules) - modules if _is_users(sys.modules[name]))
        _ran_in = os.getpid()


def _open_files() -> set[str]:
    """The regular files that this process has open."""
    found = set()
    with contextlib.suppress(OSError):  # not every system has it
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if stat.S_ISREG(os.fstat(int(number)).st_mode):
                    found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


def _is_users(module: object) -> bool:
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not file.startswith(tuple(sysconfig.get_paths().values()))


def _forget() -> None:
    global _ran_in
    for name in _runs_again:
        sys.modules.pop(name, None)
    _loaded.clear()
    _made.clear()
    _ran_in = os.getpid()


def _module(place: Place, words: list[str]) -> object:
    if _runs_again and _ran_in != os.getpid():
        _forget()
    path = place.path
    if path in _loaded:
        return _loaded[path]
    try:
        with _running(path, words):
            module = _loaded[path] = _from_package(place) if place.module else _from_file(path)
    except UsageError:
        raise
    except SystemExit as stop:
        raise UsageError(
            f"{path}: it ended Python while it was imported ({describe(stop, path)}): every process imports a job's "
            f"file, with what stands behind -- as its arguments; put what the script does, and sys.exit, under {GUARD}"
        ) from None
    except Exception as error:
        raise UsageError(f"{path}: importing it failed: {describe(error, path)}", traceback.format_exc()) from None
    return module


@contextlib.contextmanager
def _running(path: Path, words: list[str]) -> Iterator[None]:
    """The user's own code, which is told what its command line would tell it, and draws the same on every machine."""
    from wide.job.seeding import seed_everything  # needs torch, as every job does

    arguments, sys.argv = sys.argv, [str(path), *words]  # the command's own are not for it
    seed_everything(0)
    _importing.append(path)
    try:
        yield
    finally:
        sys.argv = arguments
        _importing.pop()


def _from_file(path: Path) -> object:
    """As `python file.py` runs it."""
    spec = importlib.util.spec_from_file_location(f"wide_job_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data sets that pickle their items, and dataclasses, look themselves up here
    sys.path.insert(0, str(path.parent))  # its neighbours can be imported
    spec.loader.exec_module(module)
    return module


def _from_package(place: Place) -> object:
    """As `python -m package.module` runs it; and its neighbours can still be imported by their bare names."""
    sys.path.insert(0, str(place.root))
    sys.path.append(str(place.path.parent))
    importlib.invalidate_caches()  # it may have been written a moment ago
    module = importlib.import_module(place.module)
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != place.path:
        raise UsageError(f"{place.path}: Python has another module called {place.module} ({file}): rename the package")
    return module


def is_importing() -> bool:
    """Is a job's file being run, by somebody who only wants to know what is in it?"""
    return bool(_importing)


def check_not_importing(what: str = "wide.run") -> None:
    """A script that trains while its file is being imported for training would never come to an end."""
    if _importing:
        path = _importing[-1]
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename) == path]
        line = f":{frames[-1].lineno}" if frames else ""
        raise UsageError(
            f"{path.name}{line}: it calls {what} while it is imported by another command: put that call under {GUARD}"
        )


def describe(error: BaseException, path: Path | None = None) -> str:
    """`ValueError: bad image (digits.py:42 in load)`: what was raised, and the line of the user's code it came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"SyntaxError: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    ours = str(Path(__file__).parent.parent)
    users = [f for f in frames if not f.filename.startswith((ours, "<")) and "site-packages" not in f.filename]
    if path is not None:
        users = [f for f in users if Path(f.filename) == path] or users
    text = str(error).strip().split("\n")[0]
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if not users:
        return what
    return f"{what} ({Path(users[-1].filename).name}:{users[-1].lineno} in {users[-1].name})"


@contextlib.contextmanager
def users_code(doing: str) -> Iterator[None]:
    """What the user's code raises in this block becomes one line, with its file and line; verbose has the traceback."""
    try:
        yield
    except WideError:
        raise
    except (Exception, SystemExit) as error:
        details = "".join(traceback.format_exception(error))
        raise TrainingFailed(f"{doing}: {describe(error)}", details) from None
