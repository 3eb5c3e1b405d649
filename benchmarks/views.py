"""`views`: what it costs to be looked at: the seeds' workload with a screen in a terminal, TensorBoard's files and a
tracker, against the same without any of them, alternating.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

JOB = Path(__file__).with_name("seed_job.py")
NODES = 10
SECONDS = 10.0
# A library that takes what it is given: what a tracker's own network costs is its own affair.
LIBRARY = """
def init(**_): pass
def log(values, step): print(step, values, flush=True)
def finish(): pass
"""
# Nothing is written for views: no event file, no picture in run.db. Read by every Python process of that side.
BLIND = """
import importlib.abc, sys
class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "wide.launch.training": return None
        from wide.coordinator.journal import Journal
        from wide.store.tensorboard import EventFile
        EventFile.write = lambda *_: None
        Journal.show = lambda *_: None
        Journal.tell = lambda *_: None
        return None
sys.meta_path.insert(0, Finder())
"""


def run(repeats: int, say: Callable[[str], None], seconds: float = SECONDS) -> dict[str, Any]:
    """Batches/s of both, and seen ÷ unseen in each round; medians."""
    rounds: list[dict[str, float]] = []
    for i in range(repeats):
        order = (True, False) if i % 2 else (False, True)
        found = {"seen" if is_seen else "unseen": _batches_per_s(is_seen, seconds) for is_seen in order}
        rounds.append(found)
        say(f"round {i + 1}: seen {found['seen']:.0f}, unseen {found['unseen']:.0f} batches/s")
    ratios = sorted(found["seen"] / found["unseen"] for found in rounds)
    result: dict[str, Any] = {f"{kind}_batches_per_s": median(r[kind] for r in rounds) for kind in ("seen", "unseen")}
    result |= {"ratio": median(ratios), "ratios": ratios}
    say(f"seen {result['ratio']:.3f} of unseen ({', '.join(f'{ratio:.3f}' for ratio in ratios)})")
    return result


def _batches_per_s(is_seen: bool, seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "lib").mkdir()
        name, text = ("trackio.py", LIBRARY) if is_seen else ("sitecustomize.py", BLIND)
        (Path(folder) / "lib" / name).write_text(text)
        paths = [str(Path(folder) / "lib"), str(JOB.parent.parent), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TERM": "xterm-256color"}
        command = [sys.executable, "-m", "wide", "run", f"{JOB}:ten", "--nodes", str(NODES), "--json"]
        command += ["--seconds", str(seconds), "--out", str(Path(folder) / "run")]
        command += ["--track", "trackio"] if is_seen else ["--log", "silent"]
        ours, theirs = pty.openpty()
        screen = threading.Thread(target=_read, args=(ours,), daemon=True)
        screen.start()
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True)
        os.close(theirs)
        screen.join()
    batches_per_s: float = json.loads(done.stdout)["batches_per_s"]
    return batches_per_s


def _read(terminal: int) -> None:
    """Somebody has to look at it, or it fills up."""
    try:
        while os.read(terminal, 65536):
            pass
    except OSError:
        os.close(terminal)
