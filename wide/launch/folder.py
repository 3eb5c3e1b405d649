"""A run's folder: a new one, or one that holds a run to go on with. Knows paths and the lock; knows no training."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

from wide.config import Options
from wide.errors import UsageError
from wide.job.spec import arguments_of, split_spec, title_of, with_arguments, with_told
from wide.launch import story
from wide.store.lock import FolderLock
from wide.store.reading import DATABASE
from wide.store.sessions import FILE

STAMP = r"\d{8}-\d{6}"
CHECKPOINTS, LOG = "checkpoints", "log.jsonl"


class RunFolder:
    """`path`, which nobody else writes to until `close`; `holds_run`: there is one to be resumed."""

    def __init__(self, out: Path | None, resume: str | None, name: str, job: Path | None = None) -> None:
        found = _find(out, resume, name, job) if resume is not None else None
        self.path = found or _make(out, name)
        self.holds_run = found is not None
        try:
            self._lock = FolderLock(self.path)
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written ({error.strerror}): choose a folder with --out") from None

    def close(self) -> None:
        self._lock.close()


def _find(out: Path | None, resume: str, name: str, job: Path | None) -> Path | None:
    """The run to go on with. `auto`: the one in --out, or this job's; None, if there is none yet."""
    if resume != "auto":
        path = Path(resume)
        if not (path / DATABASE).exists():
            raise UsageError(f"--resume {path}: there is no run in it (no {DATABASE}); or say --resume auto")
        if out is not None and out.absolute() != path.absolute():
            raise UsageError(f"--resume {path} goes on in its own folder: leave --out away")
        return path
    if out is not None:
        return out if (out / DATABASE).exists() else None
    runs = [path for path in Path("runs").glob("*") if _has_begun(path) and _is_of(path, name)]
    newest = max(runs, key=lambda path: path.name, default=None)
    return _only([newest] if newest is not None else [], _made_with_out(job) if job is not None else [])


def _has_begun(path: Path) -> bool:
    """Or did something go wrong before there was a run?"""
    return (path / DATABASE).exists() and ((path / FILE).exists() or (path / CHECKPOINTS).exists())


def found_run(spec: str, options: Options) -> Path | None:
    """The folder of the run that --resume means, if there is one."""
    if options.resume is None:
        return None
    path, _ = split_spec(spec)
    return _find(options.out, options.resume, title_of(path), path)


def remembered_spec(spec: str, options: Options) -> str:
    """A job that is resumed has the arguments that it had, unless others are given, and of its values those that are
    not given.
    """
    folder = found_run(spec, options)
    if folder is None:
        return spec
    words = arguments_of(spec) or arguments_of(story.spec_of(folder))
    return with_told(with_arguments(spec, words), story.set_of(folder))


def remembered_set(name: str, script: str | None, options: Options) -> dict[str, Any]:
    """The same for a function that a script, or a notebook, trains."""
    folder = found_before(name, script, options)
    return story.set_of(folder) if folder is not None else {}


def found_before(name: str, script: str | None, options: Options) -> Path | None:
    """The folder of the run that a script, or a notebook, goes on with, if it does."""
    if options.resume is None:
        return None
    return _find(options.out, options.resume, name, Path(script) if script else None)


def _made_with_out(job: Path) -> list[Path]:
    """Runs of this job in folders that somebody named, here or one further down."""
    found = [path.parent for pattern in ("*", "*/*") for path in Path().glob(f"{pattern}/{FILE}")]
    own = {folder for folder in found if folder.parent != Path("runs") or not re.match(STAMP, folder.name)}
    return sorted(folder for folder in own if split_spec(story.spec_of(folder))[0] == job.absolute())


def _only(newest: list[Path], named: list[Path]) -> Path | None:
    """The only one; or the only one that is not finished."""
    all_of_them = [*newest, *named]
    unfinished = [path for path in all_of_them if story.is_unfinished(path)]
    if len(all_of_them) > 1 and len(unfinished) != 1:
        choices = ", ".join(f"--resume {path}" for path in all_of_them[:4])
        raise UsageError(f"--resume auto: there are several runs of this job; say which one: {choices}")
    return next(iter(unfinished if len(all_of_them) > 1 else all_of_them), None)


def _is_of(path: Path, name: str) -> bool:
    """runs/20261116-044036-digits, or …-digits-2 if several began in one second."""
    return re.fullmatch(rf"{STAMP}-{re.escape(name)}(-\d+)?", path.name) is not None


def _make(out: Path | None, name: str) -> Path:
    """--out, which must not hold a run yet, or a new folder runs/<time>-<job>."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    candidates = (
        [out] if out else [Path("runs") / f"{stamp}-{name}{tail}" for tail in ("", *(f"-{i}" for i in range(2, 99)))]
    )
    for path in candidates:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(exist_ok=out is not None, mode=0o700)
            if not (path / DATABASE).exists() and (path / CHECKPOINTS / "latest").exists():
                raise UsageError(f"{path} holds the checkpoints of a run, but no {DATABASE}: choose another folder")
            if (path / DATABASE).exists():
                raise UsageError(
                    f"{path} already holds a run: go on with it (--resume {path}), or choose another folder with --out"
                )
            if not os.access(path, os.W_OK):
                raise PermissionError(13, "Permission denied")
            return path
        except FileExistsError:
            if out is not None:
                raise UsageError(f"{path} is a file: --out must name a folder") from None
        except OSError as error:
            raise UsageError(f"{path} cannot be written ({error.strerror}): choose a folder with --out") from None
    raise UsageError("too many runs began in this second: choose a folder with --out")
