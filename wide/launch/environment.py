"""What a pool's processes should find in their environment, because it counts only before Python begins. What the user
has set stays.
"""

from __future__ import annotations

from collections.abc import MutableMapping

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
