"""Is it the same program on every machine? A fingerprint of the job's file, and of the modules beside it that it
imports, line by line, so that a difference can be named. Knows files; what a line means is Python's business.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path

MAIN = ""  # the job's own file, whatever it is called
MOST_LINES = 20_000

Program = dict[str, list[int]]  # by file, a checksum of each line


def program_of(path: Path) -> Program:
    """Call it after the job was loaded, when what it imports is known."""
    folder, found = path.resolve().parent, {MAIN: _lines(path)}
    for module in list(sys.modules.values()):
        file = Path(getattr(module, "__file__", None) or "")
        if file.suffix == ".py" and folder in file.parents and "site-packages" not in file.parts:
            found[file.relative_to(folder).as_posix()] = _lines(file)
    found.pop(path.resolve().name, None)
    return found


def difference(theirs: Program, ours: Program) -> str:
    """The first way in which two programs differ, in words; empty if they do not. What only one of them has loaded so
    far says nothing.
    """
    for name, lines in ours.items():
        if name not in theirs or theirs[name] == lines:
            continue
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
