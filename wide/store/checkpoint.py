"""Checkpoints: complete on disk before `latest` names them. Knows files, tensors and plain values; not what they mean.

    .step-00000040/  ──fsync──►  rename to step-00000040/  ──fsync──►  latest says "step-00000040"  ──►  old ones go

Killed at any moment, this leaves `latest` naming a whole checkpoint, or, before the first one, no `latest`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from wide.errors import TrainingFailed, UsageError
from wide.failpoint import reach

FORMAT = 2  # of what follows; a run of a newer one is not touched
MODEL, OPTIMIZER, STATE, LATEST = "model.safetensors", "optimizer.safetensors", "state.json", "latest"
BEST = "best"
FROZEN = "frozen.safetensors"  # the rest of the model, if that is large and never changes
UNWRITABLE = (SafetensorError, KeyError, TypeError, ValueError)  # what its library, or JSON, does not know
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")

Tensors = dict[str, torch.Tensor]


class Checkpoint(NamedTuple):
    """The weights by the names of the state dict, all other tensors, and all other values. `frozen` are weights that
    are the same in every checkpoint of a run with the same `state["frozen"]`: they are written once.
    """

    step: int
    model: Tensors
    others: Tensors
    state: dict[str, Any]
    frozen: Tensors = {}  # noqa: RUF012


class Broken(Exception):
    """What is on disk is not a whole checkpoint."""


def write(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Returns where it is. Raises OSError, and then what was there before is still whole and still named."""
    final = _free_name(folder, checkpoint.step)
    temporary = folder / f".{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        _fill(temporary, checkpoint, _all(folder))
        reach("checkpoint.before_rename")
        temporary.rename(final)
    except (OSError, *UNWRITABLE) as error:
        shutil.rmtree(temporary, ignore_errors=True)  # a full disk needs the room
        raise OSError(str(error) if isinstance(error, OSError | SafetensorError) else repr(error)) from None
    _sync(folder)
    reach("checkpoint.after_rename")
    try:
        name_latest(folder, final)
    except OSError:
        if _named(folder) != final:
            shutil.rmtree(final, ignore_errors=True)  # it will be tried again, under this name
        raise
    reach("checkpoint.after_latest")
    for old in _all(folder)[keep:]:
        reach("checkpoint.before_removal")
        if old not in (final, best(folder)):
            shutil.rmtree(old, ignore_errors=True)
    return final


def name_latest(folder: Path, checkpoint: Path) -> None:
    _point(folder, LATEST, checkpoint)


def name_best(folder: Path, step: int) -> str:
    """The newest of that step. Returns why not, if so."""
    path = next((path for path in _all(folder) if _order(path)[0] == step), None)
    try:
        if path is not None:
            _point(folder, BEST, path)
    except OSError as error:
        return str(error)
    return ""


def best(folder: Path) -> Path | None:
    """The checkpoint that was best, if one was named so."""
    return _named(folder, BEST)


def _point(folder: Path, name: str, checkpoint: Path) -> None:
    pointer = folder / f".{name}"
    pointer.write_text(checkpoint.name + "\n", encoding="utf-8")
    _sync(pointer)
    os.replace(pointer, folder / name)
    _sync(folder)


def newest(folder: Path, most: float = math.inf) -> tuple[Path, Checkpoint, list[str]]:
    """The one that `latest` names, or, if it is broken, the newest that is whole; and what is wrong with others. Of at
    most so many steps.
    """
    problems: list[str] = []
    for path in _candidates(folder):
        if _order(path)[0] > most:
            continue
        try:
            return path, read(path), problems
        except Broken as error:
            problems.append(f"{path} cannot be used: {error}")
    raise TrainingFailed(f"{folder} holds no whole checkpoint{''.join(f'; {problem}' for problem in problems)}")


def read(path: Path) -> Checkpoint:
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if state.get("format", FORMAT) > FORMAT:
            raise UsageError(
                f"{path} was written by a newer version of wide (format {state['format']}, this one knows {FORMAT}): "
                "update"
            )
        for name, digest in state["files"].items():
            if _digest(path / name) != digest:
                raise Broken(f"{name} is not what was written")
        model = load_file(path / MODEL) | (load_file(path / FROZEN) if FROZEN in state["files"] else {})
        return Checkpoint(state["step"], model, load_file(path / OPTIMIZER), state)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        raise Broken(str(error)) from None


def forget_after(folder: Path, path: Path) -> None:
    """The run goes on from `path`: what came after it will be made again. So will what was not finished. Needs room on
    the disk only if `latest` does not say so yet.
    """
    if _named(folder) != path:
        name_latest(folder, path)
    for other in _all(folder):
        if _order(other) > _order(path):
            shutil.rmtree(other, ignore_errors=True)
    for unfinished in folder.glob(".step-*"):
        shutil.rmtree(unfinished, ignore_errors=True)


def is_any(folder: Path) -> bool:
    return bool(_all(folder))


def kept(folder: Path) -> list[tuple[int, Path]]:
    """Those that are there, and after how many steps; the oldest first."""
    return [(_order(path)[0], path) for path in reversed(_all(folder))]


def told(path: Path) -> dict[str, Any]:
    """What one says of itself, without its tensors; nothing, if that cannot be read."""
    try:
        return dict(json.loads((path / STATE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def oldest_step(folder: Path) -> int:
    """Of all checkpoints that are there; 0: there is none."""
    return min((_order(path)[0] for path in _all(folder) if path != best(folder)), default=0)


def _fill(temporary: Path, checkpoint: Checkpoint, others: list[Path]) -> None:
    """`others` are the checkpoints that are there already."""
    reach("checkpoint.write")
    save_file(checkpoint.model, temporary / MODEL)
    reach("checkpoint.after_model")
    save_file(checkpoint.others, temporary / OPTIMIZER)
    reach("checkpoint.after_optimizer")
    files = {name: _digest(temporary / name) for name in (MODEL, OPTIMIZER)}
    if checkpoint.frozen:
        files[FROZEN] = _put_frozen(temporary / FROZEN, checkpoint, others)
        checkpoint.state["frozen_stamp"] = _stamp(temporary / FROZEN)
    is_plain = not checkpoint.frozen
    state = {"format": 1 if is_plain else FORMAT, "step": checkpoint.step, "files": files} | checkpoint.state
    (temporary / STATE).write_text(json.dumps(state, allow_nan=False), encoding="utf-8")
    for name in (MODEL, OPTIMIZER, STATE):
        _sync(temporary / name)
    _sync(temporary)


def _put_frozen(path: Path, checkpoint: Checkpoint, others: list[Path]) -> str:
    """The same file under another name, if there is one that nobody has written to since; else a new one. Returns its
    digest.
    """
    for other in others:
        with contextlib.suppress(OSError, ValueError, KeyError):
            state = json.loads((other / STATE).read_text(encoding="utf-8"))
            if state["frozen"] == checkpoint.state["frozen"] and state["frozen_stamp"] == _stamp(other / FROZEN):
                digest: str = state["files"][FROZEN]
                os.link(other / FROZEN, path)
                return digest
    save_file({key: value.contiguous() for key, value in checkpoint.frozen.items()}, path)
    _sync(path)
    return _digest(path)


def _stamp(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns]


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Until it is on the disk. Folders cannot be opened on Windows, which keeps their order by itself."""
    if os.name == "nt" and path.is_dir():
        return
    fd = os.open(path, os.O_RDONLY if os.name != "nt" else os.O_RDWR)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _free_name(folder: Path, step: int) -> Path:
    """In `async` and `local` several versions may fall into one step."""
    path, more = folder / f"step-{step:08d}", 1
    while path.exists():
        more += 1
        path = folder / f"step-{step:08d}-{more}"
    return path


def _order(path: Path) -> tuple[int, int]:
    found = NAME.fullmatch(path.name)
    return (int(found[1]), int(found[2] or 1)) if found else (-1, 0)


def _all(folder: Path) -> list[Path]:
    """The newest first."""
    return sorted((path for path in folder.glob("step-*") if NAME.fullmatch(path.name)), key=_order, reverse=True)


def _named(folder: Path, pointer: str = LATEST) -> Path | None:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (folder / pointer).read_text(encoding="utf-8").strip()
        return folder / name if NAME.fullmatch(name) else None
    return None


def _candidates(folder: Path) -> list[Path]:
    named = _named(folder)
    return ([named] if named else []) + [path for path in _all(folder) if path != named]
