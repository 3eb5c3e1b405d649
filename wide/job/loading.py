"""From `file.py` or `file.py:name` to a Job. Runs the user's file as Python would; knows nothing of pools.

A job's own arguments (`wide run file.py -- --lr 0.3`) are part of its spec, so that whoever is told the spec, in
whatever process, loads the same job.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from wide.errors import TrainingFailed, UsageError, WideError
from wide.job.definition import Job

SEPARATOR = "\x1f"  # between a spec and a job's arguments; no file's name has it
GUARD = 'if __name__ == "__main__":'
_importing: list[Path] = []  # files that are being imported right now
_loaded: dict[Path, object] = {}  # so that a process forked from a warm parent need not run the file again
_runs_again: set[str] = set()  # unless it must: these modules it brought along
_ran_in = 0  # the process in which that was so last


def with_arguments(spec: str, arguments: Sequence[str]) -> str:
    """The spec of the job that this file makes of these words."""
    if any(SEPARATOR in word or "\0" in word for word in arguments):
        raise UsageError("a job's arguments are printable text")
    return SEPARATOR.join((spec, *arguments))


def arguments_of(spec: str) -> list[str]:
    return spec.split(SEPARATOR)[1:]


def split_spec(spec: str) -> tuple[Path, str]:
    """`path/file.py:name` in its two parts; the name is `job` unless given."""
    spec = spec.partition(SEPARATOR)[0]
    path, colon, name = spec.rpartition(":")
    if colon and name.isidentifier():
        return Path(path), name
    return Path(spec), "job"


def find(spec: str) -> tuple[Path, str]:
    """The same, for a file that must be there."""
    path, name = split_spec(spec)
    if not path.is_file():
        where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
        raise UsageError(f"{path}: no such file{where}; give the Python file that holds your wide.Job")
    return path, name


def load(spec: str) -> Job:
    """Import the job's file and return the Job it names, or say in one line why that cannot be done."""
    path, name = find(spec)
    module = _module(path.resolve(), arguments_of(spec))
    job = getattr(module, name, None)
    if not isinstance(job, Job):
        others = [key for key, value in vars(module).items() if isinstance(value, Job)]
        hint = f"; it has {', '.join(others)}: say {path}:{others[0]}" if others else f"; write `{name} = wide.Job(…)`"
        raise UsageError(f"{path}: there is no wide.Job called {name!r} in it{hint}")
    return job


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
    _ran_in = os.getpid()


def _module(path: Path, words: list[str]) -> object:
    if _runs_again and _ran_in != os.getpid():
        _forget()
    if path in _loaded:
        return _loaded[path]
    spec = importlib.util.spec_from_file_location(f"wide_job_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # data sets that pickle their items, and dataclasses, look themselves up here
    sys.path.insert(0, str(path.parent))  # its neighbours can be imported, as with `python file.py`
    arguments, sys.argv = sys.argv, [str(path), *words]  # the command's own are not for it
    from wide.job.seeding import seed_everything  # needs torch, as every job does

    seed_everything(0)  # what the file draws while it is imported is the same on every machine
    _importing.append(path)
    try:
        spec.loader.exec_module(module)
    except UsageError:
        raise
    except SystemExit as stop:
        raise UsageError(
            f"{path}: it ended Python while it was imported ({describe(stop, path)}): every process imports a job's "
            f"file, with what stands behind -- as its arguments; put what the script does, and sys.exit, under {GUARD}"
        ) from None
    except Exception as error:
        raise UsageError(f"{path}: importing it failed: {describe(error, path)}", traceback.format_exc()) from None
    finally:
        sys.argv = arguments
        _importing.pop()
    _loaded[path] = module
    return module


def check_not_importing() -> None:
    """A script that trains while its file is being imported for training would never come to an end."""
    if _importing:
        path = _importing[-1]
        frames = [frame for frame in traceback.extract_stack() if Path(frame.filename) == path]
        line = f":{frames[-1].lineno}" if frames else ""
        raise UsageError(
            f"{path.name}{line}: it calls wide.run while it is imported by another command: put that call under {GUARD}"
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
