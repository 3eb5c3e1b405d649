"""Is it the same program on every machine? Which files it is made of: the job's own, and the modules beside it that it
imports. A fingerprint of each, line by line, so that a difference can be named. Knows files; what a line means is
Python's business.
"""

from __future__ import annotations

import ast
import contextlib
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path

from wide.job.loading import arguments_of, split_spec

INSTALLED = {"site-packages", "dist-packages"}
PYTHONS = {Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}  # it may lie in the job's folder
OURS = Path(__file__).parents[1]  # which every machine has, installed
MAIN = ""  # the job's own file, whatever it is called
ARGUMENTS = "--"
MOST_LINES = 20_000

Program = dict[str, list[int]]  # by file, a checksum of each line


def program_of(spec: str | Path) -> Program:
    """Call it after the job was loaded, when what it imports is known. The job's arguments are part of it."""
    path, words = split_spec(str(spec))[0], arguments_of(str(spec))
    main = path.resolve().name
    files = {MAIN if name == main else name: _lines(file) for name, file in files_of(path).items()}
    return files | {ARGUMENTS: [zlib.crc32(word.encode()) for word in words]}


def files_of(path: Path) -> dict[str, Path]:
    """The job's file and the modules in its folder that it imports, by their names there; nothing from outside it."""
    path = path.resolve()
    found, unread = {path.name: path}, [path]
    for module in list(sys.modules.values()):
        _add(Path(getattr(module, "__file__", None) or ""), path.parent, found, unread)
    while unread:
        for name in _imports(unread.pop(), path.parent):
            base = path.parent.joinpath(*name.split("."))
            for file in (base.with_suffix(".py"), base / "__init__.py"):
                if file.is_file():
                    _add(file, path.parent, found, unread)
    return found


def _add(file: Path, folder: Path, found: dict[str, Path], unread: list[Path]) -> None:
    """If it is the user's own, and new; and the packages that it is in."""
    if file.suffix != ".py" or INSTALLED.intersection(file.parts) or OURS in file.parents:
        return
    if any(path in file.parents for path in PYTHONS):
        return
    with contextlib.suppress(OSError):
        file = file.resolve(strict=True) if file.is_absolute() else Path()  # a link may lead elsewhere
    if folder not in file.parents:
        return
    name = file.relative_to(folder).as_posix()
    if name in found or any(part.startswith(".") for part in Path(name).parts):
        return
    found[name] = file
    unread.append(file)
    if file.parent != folder and (package := file.parent / "__init__.py").is_file():
        _add(package, folder, found, unread)


def _imports(file: Path, folder: Path) -> Iterator[str]:
    """What is imported anywhere in that file, also within functions: perhaps it is a module in the folder."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    package = file.parent.relative_to(folder).parts
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
    return [zlib.crc32(line.rstrip().encode()) for line in text.rstrip().splitlines()[:MOST_LINES]]
