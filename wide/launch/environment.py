"""What a pool's processes should find in their environment, because it counts only before Python begins; and what they
give back once they have begun. What the user has set stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

_KEPT = str(1 << 30)
WISHES = {
    # The order of a set of strings is part of many a program, by mistake: let it be the same in every process.
    "PYTHONHASHSEED": "0",
    # glibc gives large blocks back to the system and asks for them again with every batch: a gradient of 200 MB costs
    # 48,000 page faults, a third of the time of its batch (docs/findings.md).
    "MALLOC_TRIM_THRESHOLD_": _KEPT,
    "MALLOC_MMAP_THRESHOLD_": _KEPT,
}


def add_wishes(environment: MutableMapping[str, str]) -> list[str]:
    """The names that were missing."""
    missing = [name for name in WISHES if name not in environment]
    environment.update({name: WISHES[name] for name in missing})
    return missing


MADV_DONTNEED = 4


def give_back_what_was_only_read() -> None:
    """Pages of libraries that were looked at while they were loaded: 60 MB in the process that others are forked from.
    They are not in the children, and whoever needs one of them again finds it in the system's cache.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library, or no /proc
            advise = ctypes.CDLL(None).madvise
            for start, end in _only_read(Path("/proc/self/smaps").read_text().splitlines()):
                advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _only_read(smaps: list[str]) -> Iterator[tuple[int, int]]:
    """Stretches of memory that are a file's and never were written to: what the loader has relocated is not."""
    start = end = 0
    is_a_files = False
    for line in smaps:
        first, *others = line.split()
        if not first.endswith(":"):
            start, end = (int(bound, 16) for bound in first.split("-"))
            is_a_files = len(others) > 4 and others[4].startswith("/") and "w" not in others[0]
        elif first == "Anonymous:" and others[0] == "0" and is_a_files:
            yield start, end
