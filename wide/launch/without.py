"""Going on with a run as if a node had never been there: from before its first work. Knows run.db."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from wide.errors import UsageError
from wide.store.reading import DATABASE


def before(folder: Path, node: str) -> int:
    """The step in which this node, by number or by name, first had a part."""
    with contextlib.closing(sqlite3.connect(f"file:{folder / DATABASE}?mode=ro", uri=True)) as db:
        known_by = "CAST(node AS TEXT)" if node.isdecimal() else "name"  # anybody may call a node like another's number
        rows = db.execute(f"SELECT DISTINCT node FROM nodes WHERE {known_by} = ?", (node,))
        numbers = [number for (number,) in rows]
        if not numbers:
            raise UsageError(
                f"--without {node}: {folder} has had no node of that number or name (see: wide show {folder})"
            )
        marks = ",".join("?" * len(numbers))
        is_folded = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'folded'").fetchone() is not None
        if is_folded and db.execute(f"SELECT 1 FROM shares WHERE node IN ({marks})", numbers).fetchone() is not None:
            return 0
        (first,) = db.execute(f"SELECT min(step) FROM ledger WHERE node IN ({marks})", numbers).fetchone()
    if first is None:
        raise UsageError(f"--without {node}: nothing of its work is in {folder}; go on without this option")
    return int(first)
