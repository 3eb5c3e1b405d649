"""run.json, read: one entry for each process that coordinated a run. Whatever is in it, reading it does not fail."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
    """As JSON has it."""
    return value if isinstance(value, int | float | str | None) else str(value)
