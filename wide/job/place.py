"""From what somebody typed to a job's file: `file.py`, or `package.module` as `python -m` would find it; and where its
imports start from: in the folder that holds it, or that holds the package it is in. Imports nothing.
"""

from __future__ import annotations

import difflib
import importlib.machinery
import pkgutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from wide.errors import UsageError
from wide.job.spec import parts, shown, split_spec

START, MAIN = "__init__", "__main__"


@dataclass(frozen=True)
class Place:
    """A job's file, its name there, and the module that the file is, if it is in a package."""

    path: Path
    name: str
    module: str = ""

    @property
    def root(self) -> Path:
        """The folder that its imports start from; nothing outside of it is sent to anybody."""
        return self.path.parents[_depth(self.path, self.module) if self.module else 0]

    @property
    def file(self) -> str:
        """Its name there."""
        return self.path.relative_to(self.root).as_posix()


def place_of(spec: str) -> Place:
    """The file need not be there."""
    path, name = split_spec(spec)
    path, module = path.resolve(), parts(spec).module
    if not module or module_at(path, _depth(path, module)) != module:
        module = _module_of(path)  # behind a link the packages may have other names
    return Place(path, name, module)


def located(spec: str) -> str:
    """The spec with its job's file, which is there; raises UsageError in words if it is not."""
    path, name = split_spec(spec)
    if path.is_file():
        return spec
    given, here = parts(spec), Path.cwd()
    if "/" in given.place or path.suffix == ".py" or not all(part.isidentifier() for part in str(path).split(".")):
        _missing(path)
    module, file = _found(str(path))
    place = f"{file.relative_to(here) if here in file.parents else file}:{name}"
    return str(replace(given, place=place, module="" if _module_of(file.resolve()) == module else module))


def _missing(path: Path) -> NoReturn:
    where = "" if path.is_absolute() else f" (looked for in {Path.cwd()})"
    hint = f"; did you mean {path}.py?" if path.with_name(f"{path.name}.py").is_file() else ""
    raise UsageError(
        f"{path}: no such file{where}{hint or '; give the Python file that holds your wide.Job, or package.module'}"
    )


def _found(words: str) -> tuple[str, Path]:
    """As what `python -m` imports it, and its file: of a package its __main__, or what it is made of."""
    around: Sequence[str] | None = None
    names = words.split(".")
    for depth, part in enumerate(names):
        spec = _look_up(".".join(names[: depth + 1]), around)
        if spec is None:
            _unknown(names[:depth], part, [str(Path.cwd())] if around is None else around)
        around, origin = spec.submodule_search_locations, spec.origin
        if around is None and depth + 1 < len(names):
            raise UsageError(f"{words}: {'.'.join(names[: depth + 1])} is a module, not a package: nothing is in it")
    if around is not None and (main := _look_up(f"{words}.{MAIN}", around)) is not None:
        words, origin = f"{words}.{MAIN}", main.origin
    if origin is None or not origin.endswith(".py"):
        what = "a folder" if around is not None else "no Python file"
        raise UsageError(f"{words}: it is {what}; give the file or the module that holds your wide.Job")
    return words if around is not None or "." in words else "", Path(origin)


def _look_up(name: str, around: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    """In the current folder first, then wherever Python looks; packages are not imported for that."""
    if around is not None:
        return importlib.machinery.PathFinder.find_spec(name, around)
    here = importlib.machinery.PathFinder.find_spec(name, [str(Path.cwd())])
    found = (finder.find_spec(name, None) for finder in sys.meta_path)
    return here or next((spec for spec in found if spec is not None), None)


def _unknown(above: list[str], part: str, around: Sequence[str]) -> NoReturn:
    names = [module.name for module in pkgutil.iter_modules(around)]
    close = [".".join((*above, name)) for name in difflib.get_close_matches(part, names, 1)]
    hint = f"did you mean {close[0]}?" if close else "give the Python file that holds your wide.Job, or package.module"
    if above:
        raise UsageError(f"{'.'.join((*above, part))}: there is no module {part} in {'.'.join(above)}; {hint}")
    raise UsageError(f"{shown(part)}: no such file, and no such module (looked for in {Path.cwd()}); {hint}")


def _module_of(path: Path) -> str:
    """As what it is imported if it lies in a package, a folder with __init__.py; empty if it does not."""
    depth, folder = 0, path.parent
    while (folder / f"{START}.py").is_file() and folder.name and folder != folder.parent:
        depth, folder = depth + 1, folder.parent
    return module_at(path, depth)


def _depth(path: Path, module: str) -> int:
    """In how many folders below the first one it lies."""
    return module.count(".") + (path.stem == START)


def module_at(path: Path, depth: int) -> str:
    """With so many of the folders above it; empty, if Python could not import that."""
    names = [folder.name for folder in reversed(path.parents[:depth])] + [path.stem] * (path.stem != START)
    return ".".join(names) if depth and all(name and "." not in name for name in names) else ""
