"""`scale`: what one message costs a coordinator with 10 nodes and with 1,000, and what memory a node that waits takes.

The nodes are light ones (light.py), in a few processes; what counts is the coordinator's own CPU time and memory.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil

FEW, MANY, PROCESSES = 10, 1000, 2
WARM_S, SECONDS = 3.0, 8.0
JOB = Path(__file__).with_name("scale_job.py")


def run(repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
    say(f"about {repeats * 2 * (WARM_S + SECONDS + 15) / 60 + 0.5:.0f} minutes")
    rows = []
    for i in range(repeats):
        few, many = _cost(FEW), _cost(MANY)
        rows.append({"few_us": few[0], "many_us": many[0], "loop_max_ms": many[1], "ratio": many[0] / few[0]})
        say(
            f"round {i + 1}: {few[0]:.0f} µs of CPU for an update with {FEW} nodes, {many[0]:.0f} with {MANY}; "
            f"longest turn with {MANY}: {many[1]:.1f} ms"
        )
    idle_kb = _kb_per_idle_node()
    say(f"{idle_kb:.0f} KB for a node that waits")
    return {
        "cost_1000_vs_10": median(row["ratio"] for row in rows),
        "us_per_update_10": median(row["few_us"] for row in rows),
        "us_per_update_1000": median(row["many_us"] for row in rows),
        "loop_max_ms_1000": median(row["loop_max_ms"] for row in rows),
        "kb_per_idle_node": idle_kb,
    }


def _cost(nodes: int) -> tuple[float, float]:
    """CPU time for each update, in µs, with one batch in a step for each node; and the loop's longest turn, in ms."""
    with _pool(per_step=nodes) as pool:
        pool.join(nodes)
        time.sleep(WARM_S)
        began, before = time.time(), pool.cpu_s()
        time.sleep(SECONDS)
        ended, spent_s = time.time(), pool.cpu_s() - before
        time.sleep(1.0)  # until all of it is written
        updates = pool.ask("SELECT count(*) FROM ledger WHERE committed_at BETWEEN ? AND ?", began, ended)
        longest = pool.ask("SELECT max(value) FROM samples WHERE metric = 'loop_max_ms' AND at > ?", began)
    return 1e6 * spent_s / updates, longest


def _kb_per_idle_node() -> float:
    with _pool(per_step=FEW) as pool:
        pool.join(FEW)
        time.sleep(WARM_S)
        before = pool.uss()
        pool.join(MANY)
        time.sleep(WARM_S)
        return (pool.uss() - before) / MANY / 1024


class _Pool:
    """`wide serve`, and whoever joined it."""

    def __init__(self, folder: Path, per_step: int, stack: contextlib.ExitStack) -> None:
        self._stack, self._out, self._token = stack, folder / "run", secrets.token_hex(8)
        self._job = str(shutil.copy(JOB, folder))  # away from modules that others beside it import
        self._environment = os.environ | {"WIDE_TOKEN": self._token, "WIDE_SCALE": str(per_step)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        command = ["-m", "wide", "serve", self._job, "--port", str(self._port), "--out", str(self._out)]
        self._process = self._start(*command, "--log", "silent", "--compress", "none", "--no-check")
        while not _answers(self._port):
            time.sleep(0.1)
            if self._process.poll() is not None:
                raise SystemExit(f"wide serve ended with {self._process.returncode}")

    def join(self, count: int) -> None:
        processes = min(PROCESSES, count)
        sizes = [count // processes + (i < count % processes) for i in range(processes)]
        light = [self._start("-m", "benchmarks.light", str(self._port), self._token, self._job, str(n)) for n in sizes]
        for process in light:
            assert process.stdout is not None
            if process.stdout.readline() != b"ready\n":
                raise SystemExit("light nodes could not join")

    def cpu_s(self) -> float:
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.user + times.system)

    def uss(self) -> float:
        return float(psutil.Process(self._process.pid).memory_full_info().uss)

    def ask(self, query: str, *values: float) -> Any:
        with contextlib.closing(sqlite3.connect(self._out / "run.db")) as db:
            return db.execute(query, values).fetchone()[0]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=self._environment
        )
        self._stack.callback(_end, process)
        return process


@contextlib.contextmanager
def _pool(per_step: int) -> Iterator[_Pool]:
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        yield _Pool(Path(folder), per_step, stack)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
