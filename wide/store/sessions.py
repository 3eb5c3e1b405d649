"""run.json, read: one entry for each process that coordinated a run. Whatever is in it, reading it does not fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

FILE = "run.json"
SCHEMA = "wide.run/1"


def sessions(folder: Path) -> list[dict[str, Any]]:
    """What those processes wrote; nothing, if that cannot be read."""
    try:
        told = json.loads((folder / FILE).read_text(encoding="utf-8"))
        return [dict(session) for session in told["sessions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def plain(value: Any) -> Any:
    """As JSON has it; of several values in one, those that are not as usual."""
    if isinstance(value, msgspec.Struct):
        usual = type(value)()
        mine = ((name, getattr(value, name)) for name in value.__struct_fields__)
        return ", ".join(f"{name}={found}" for name, found in mine if found != getattr(usual, name))
    return value if isinstance(value, int | float | str | None) else str(value)
