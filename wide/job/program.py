"""Is it the same program on every machine? Which files it is made of: the job's own, and the modules that it imports
from its folder, or from the one that holds its package. A fingerprint of each, line by line, and of what the job is
told, so that a difference can be named. Knows files; what a line means is Python's business.
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from wide.job.loading import values_of
from wide.job.place import Place, place_of
from wide.job.spec import arguments_of

INSTALLED = {"site-packages", "dist-packages"}
PYTHONS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}  # it may lie in the job's folder
OURS = Path(__file__).parents[1]  # which every machine has, installed
MAIN = ""  # the job's own file, whatever it is called
ARGUMENTS, SET = "--", "--set "  # the job's own, and each of its function's values
MOST_LINES = 20_000
MOST_NBYTES = 2 << 20  # of a file that is looked into for what it imports

Program = dict[str, list[int]]  # by file, a checksum of each line


def program_of(spec: str | Path) -> Program:
    """Call it after the job was loaded, when what it imports is known. What the job is told is part of it."""
    spec = str(spec)
    main = place_of(spec).file
    files = {MAIN if name == main else name: _lines(file) for name, file in files_of(spec).items()}
    told = {f"{SET}{name}": [_sum(json.dumps(value))] for name, value in values_of(spec).items()}
    return files | told | {ARGUMENTS: [_sum(word) for word in arguments_of(spec)]}


def files_of(spec: str | Path) -> dict[str, Path]:
    """The job's file and the modules in its folder that it imports, by their names there; nothing from outside it."""
    place = place_of(str(spec))
    own = _own_folder(place)
    found, unread = {place.file: place.path}, [place.path]
    _add_packages(place.path, own, place.root, found, unread)
    for module in list(sys.modules.values()):
        _add(Path(getattr(module, "__file__", None) or ""), own, place.root, found, unread)
    while unread:
        for name in _imports(unread.pop(), place.root):
            for folder in dict.fromkeys((place.root, place.path.parent)):
                base = folder.joinpath(*name.split("."))
                for file in (base.with_suffix(".py"), base / "__init__.py"):
                    if file.is_file():
                        _add(file, own, place.root, found, unread)
    return found


def _own_folder(place: Place) -> Path:
    """Beside a package that is installed lies what others have written."""
    is_installed = not INSTALLED.isdisjoint(place.root.parts)
    return place.root / (place.module.partition(".")[0] or place.path.name) if is_installed else place.root


def _add(file: Path, own: Path, root: Path, found: dict[str, Path], unread: list[Path]) -> None:
    """If it is the user's own, and new; and the packages that it is in."""
    if file.suffix != ".py" or OURS in file.parents:
        return
    if any(path in file.parents and path not in own.parents for path in PYTHONS):
        return
    with contextlib.suppress(OSError):
        file = file.resolve(strict=True) if file.is_absolute() else Path()  # a link may lead elsewhere
    if own not in file.parents or not INSTALLED.isdisjoint(file.relative_to(own).parts):
        return
    name = file.relative_to(root).as_posix()
    if name in found or any(part.startswith(".") for part in Path(name).parts):
        return
    found[name] = file
    unread.append(file)
    _add_packages(file, own, root, found, unread)


def _add_packages(file: Path, own: Path, root: Path, found: dict[str, Path], unread: list[Path]) -> None:
    if file.parent != root and (package := file.parent / "__init__.py").is_file():
        _add(package, own, root, found, unread)


def _imports(file: Path, root: Path) -> Iterator[str]:
    """What is imported anywhere in that file, also within functions: perhaps it is a module in the folder."""
    try:
        if file.stat().st_size > MOST_NBYTES:
            return  # data, in a file of code's name: to read it would take a minute
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = file.parent.relative_to(root).parts
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            yield base
            yield from (f"{base}.{name.name}" if base else name.name for name in node.names)


def difference(theirs: Program, ours: Program) -> str:
    """The first way in which two programs differ, in words; empty if they do not. What only one of them has loaded so
    far says nothing.
    """
    for name, lines in ours.items():
        if name not in theirs or theirs[name] == lines:
            continue
        if name == ARGUMENTS:
            return "your job's arguments, behind --, are not the pool's"
        if name.startswith(SET):
            return f"your job's {name.removeprefix(SET)} is not the pool's: give the same value with --set"
        what = name or "your job's file"
        pairs = zip(lines, theirs[name], strict=False)
        first = next((i for i, (mine, other) in enumerate(pairs, 1) if mine != other), None)
        if first is not None:
            return f"{what} is not the pool's: line {first} differs"
        return f"{what} has {len(theirs[name])} lines, the pool's {len(lines)}"
    return ""


def _lines(path: Path) -> list[int]:
    """White space at the ends of lines, and how lines end, is no difference."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [_sum(line.rstrip()) for line in text.rstrip().splitlines()[:MOST_LINES]]


def _sum(text: str) -> int:
    return zlib.crc32(text.encode())
