"""A `wide serve` on this machine, honest nodes and a liar that join it, and what came of that: from its exit code, its
run.db, and the liar's own tally. Knows processes and files; knows nothing of how liars are found.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from wide.launch.child import end_with_parent
from wide.launch.processes import Children, warm_up
from wide.node.worker import PR_SET_PDEATHSIG

ROOT = Path(__file__).parents[1]
JOBS = Path(__file__).with_name("liars_job.py")
TOKEN = "liars-and-others"  # of pools that only this machine can reach
MOST_S = 120.0  # a run; who needs longer hangs
MOST_WATCHED_S = 600.0
LOOK_S = 0.1
GRACE_S = 5.0
LIAR = "liar"
SERIOUS = ("named", "quarantined", "faulty")  # events that are about somebody
HARMLESS = ("late", "duplicate")
DECISIONS = (*SERIOUS, "doubted", "cleared")


@dataclass
class Outcome:
    """`code` None: the coordinator did not end. `told`: of each node by name, which decisions there were about it."""

    code: int | None
    result: dict[str, Any]
    seconds: float
    accuracy: float | None = None
    told: dict[str, list[str]] = field(default_factory=dict)
    words: str = ""  # the first ones about the liar
    rejects: int = 0  # of the liar's updates
    left: str = ""  # why the liar is gone
    merged: int = 0  # of the liar's blocks
    leases: int = 0  # that the liar handed in, and
    lies: int = 0  # those of them that were none

    @property
    def known_as(self) -> str:
        """How far the pool got with its liar; empty: not at all."""
        about = self.told.get(LIAR, [])
        return next((kind for kind in DECISIONS[:-1] if kind in about), "rejected" if self.rejects else "")

    @property
    def is_found(self) -> bool:
        return not set(SERIOUS).isdisjoint(self.told.get(LIAR, []))

    @property
    def wronged(self) -> list[str]:
        """Honest nodes that were quarantined or named, or that failed where others did not."""
        return [name for name, kinds in self.told.items() if name != LIAR and not set(SERIOUS).isdisjoint(kinds)]


class Pool:
    """A served pool in `folder`. Nodes are forked from a server that has torch loaded, each is `wide join`."""

    def __init__(self, folder: str | Path, job: str, *options: str) -> None:
        self._folder, self._job, self._children = Path(folder), job, Children()
        self._tally = self._folder / "tally"
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        command = [sys.executable, "-m", "wide", "serve", job, "--port", self._address.split(":")[1], "--json"]
        command += ["--out", str(self._folder / "run"), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "WIDE_TOKEN": TOKEN, "WIDE_LOG": ""}
        warm_up(f"{JOBS}:digits")
        self._began = time.monotonic()
        with open(self._folder / "said", "wb") as said:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=said, preexec_fn=_end_with_parent
            )

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._children.kill()
        self._children.join()
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def join(self, name: str, slower: float = 1.0) -> None:
        """An honest node."""
        self._children.start("benchmarks.liars_pool", "be_node", *self._told(name), slower)

    def lie(self, kind: str, seed: int = 0, share: float | None = None) -> None:
        told = self._told(LIAR)
        self._children.start("benchmarks.liars_pool", "be_liar", *told, kind, seed, share, str(self._tally))

    def _told(self, name: str) -> tuple[list[str], str]:
        words = [self._address, "--job", self._job, "--name", name, "--retry", "60"]
        return words, str(self._folder / f"{name}.said")

    def said(self) -> str:
        """The coordinator's last line."""
        lines = (self._folder / "said").read_text(encoding="utf-8", errors="replace").splitlines()
        return lines[-1] if lines else ""

    def outcome(self, most_leases: float | None = None) -> Outcome:
        """When the run is over; or, with `most_leases`, when the liar is found out or has handed in so many."""
        if most_leases is not None:
            self._watch(most_leases)
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(MOST_S)
        if code is None:
            self._process.kill()
        output, _ = self._process.communicate()
        self._children.stop(GRACE_S)
        result = json.loads(output) if code == 0 and output.strip() else {}
        outcome = Outcome(code, result, time.monotonic() - self._began)
        if self._tally.exists():
            tally = self._tally.read_bytes()
            outcome.leases, outcome.lies = len(tally), tally.count(b"x")
        with contextlib.suppress(sqlite3.Error), self._database() as db:
            _read(db, outcome)
        return outcome

    def _watch(self, most_leases: float) -> None:
        """Then the run is asked to end."""
        deadline = time.monotonic() + MOST_WATCHED_S
        while time.monotonic() < deadline and self._process.poll() is None and not self._is_found():
            if self._tally.exists() and self._tally.stat().st_size > most_leases:
                break
            time.sleep(LOOK_S)
        self._process.terminate()

    def _is_found(self) -> bool:
        query = "SELECT 1 FROM events JOIN nodes USING (node) WHERE name = ? AND kind IN (?, ?, ?)"
        with contextlib.suppress(sqlite3.Error), self._database() as db:
            return db.execute(query, (LIAR, *SERIOUS)).fetchone() is not None
        return False

    def _database(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(f"file:{self._folder}/run/run.db?mode=ro", uri=True))

    def leap(self) -> float:
        """How many times larger the largest of the steps' losses is than their median."""
        with self._database() as db:
            losses = [loss for (loss,) in db.execute("SELECT loss FROM steps") if loss is not None]
        return float(max(losses) / median(losses)) if losses else 0.0


def _read(db: sqlite3.Connection, outcome: Outcome) -> None:
    names = dict(db.execute("SELECT node, name FROM nodes"))
    for node, kind, words in db.execute("SELECT node, kind, words FROM events ORDER BY at"):
        if kind in DECISIONS and node is not None:
            outcome.told.setdefault(names.get(node, str(node)), []).append(kind)
            if names.get(node) == LIAR and not outcome.words:
                outcome.words = words
    liars = [node for node, name in names.items() if name == LIAR]
    for node, reason, detail in db.execute("SELECT node, reason, detail FROM rejects ORDER BY at"):
        if node in liars and reason not in HARMLESS:
            outcome.rejects += 1
            outcome.words = outcome.words or f"{reason}: {detail}"
    for node, why in db.execute("SELECT node, why FROM nodes WHERE why IS NOT NULL ORDER BY left_at"):
        outcome.left = why if node in liars else outcome.left
    for (value,) in db.execute("SELECT value FROM evaluations WHERE metric = 'accuracy' ORDER BY step"):
        outcome.accuracy = value
    for node in liars:
        outcome.merged += db.execute("SELECT count(*) FROM ledger WHERE node = ?", (node,)).fetchone()[0]


def _end_with_parent() -> None:
    """Should this benchmark be killed, its pool does not stay behind; where the system can do that."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def be_node(words: list[str], said: str, slower: float) -> None:
    """In a process of its own."""
    from wide.cli.main import main

    _begin(said)
    os.environ["WIDE_BENCHMARK_SLOWER"] = str(slower)
    sys.exit(main(["join", *words]))


def be_liar(words: list[str], said: str, kind: str, seed: int, share: float | None, tally: str) -> None:
    """In a process of its own, too."""
    from faults.liar import be
    from faults.lies import Liar

    _begin(said)
    sys.exit(be(Liar(kind, share, None, seed, tally), words))


def _begin(said: str) -> None:
    fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.environ["WIDE_TOKEN"] = TOKEN
    threading.Thread(target=end_with_parent, args=(GRACE_S,), daemon=True).start()
