"""`rundb`: how large run.db becomes at 1,000 leases a second, with 10 and with 1,000 nodes; and how long a report on a
million leases takes, and how large it is. Written through the real record and database, on a clock of its own.
"""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.staged import Staged

LEASES_PER_S = 1000.0
HOURS = 2.0
REPORT_LEASES = 1_000_000


def run(repeats: int, say: Callable[[str], None], seconds: float = 3600 * HOURS) -> dict[str, Any]:
    """MB at the end of each quarter of that time: what does not grow any more in the last ones stays as it is."""
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for nodes in (10, 1000):
            result[f"mb_{nodes}"] = _sizes(Path(folder) / str(nodes), nodes, seconds, say)
        result |= _report(Path(folder) / "report", say)
    return result


def _sizes(folder: Path, nodes: int, seconds: float, say: Callable[[str], None]) -> list[float]:
    staged, sizes = Staged(folder, nodes, LEASES_PER_S), []
    for quarter in range(1, 5):
        staged.run(int(seconds * LEASES_PER_S / 4))
        sizes.append(round(sum(path.stat().st_size for path in folder.glob("run.db*")) / 1e6, 1))
        say(f"{nodes} nodes, {staged.now / 3600:.2f} h: {sizes[-1]:.1f} MB")
        if quarter == 4:
            staged.close()
    with sqlite3.connect(folder / "run.db") as db:
        holes = db.execute("SELECT count(*) FROM (SELECT step FROM ledger GROUP BY step)").fetchone()[0]
        (last,) = db.execute("SELECT max(step) FROM steps").fetchone()
    if holes != last + 1:
        raise AssertionError(f"the ledger has {holes} steps of {last + 1}")
    return sizes


def _report(folder: Path, say: Callable[[str], None]) -> dict[str, Any]:
    staged = Staged(folder, 10, LEASES_PER_S)
    staged.run(REPORT_LEASES)
    staged.close()
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "wide", "report", str(folder)], check=True, stdout=subprocess.DEVNULL)
    took_s, size_mb = time.perf_counter() - began, (folder / "report.html").stat().st_size / 1e6
    say(f"a report on {REPORT_LEASES:,} leases: {took_s:.1f} s, {size_mb:.2f} MB")
    return {"report_s": took_s, "report_mb": size_mb}
