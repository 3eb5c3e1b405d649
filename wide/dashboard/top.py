"""`wide top`: a run that goes on in another process, on this terminal. Reads its run.db once a second."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from wide.dashboard.account import RUNNING, look
from wide.dashboard.progress import line
from wide.dashboard.terminal import PIPED_S, Screen, has_screen
from wide.telemetry.snapshot import Snapshot

EVERY_S = 1.0
NOTHING = ("it has not begun yet", 0.0)


def watch(folder: Path, is_plain: bool, is_once: bool) -> str:
    """Until the run is over, or somebody has seen enough (Ctrl-C). Its last words."""
    run, snapshot = look(folder)
    if is_once or run.state != RUNNING or not has_screen(sys.stdout, is_plain):
        return _lines(folder, is_once)
    with Screen(sys.stdout, is_whole=True) as screen:
        while run.state == RUNNING:
            screen.show(snapshot or Snapshot(0.0), NOTHING)
            time.sleep(EVERY_S)
            run, snapshot = look(folder)
    return f"{run.state}: {run.why}"


def _lines(folder: Path, is_once: bool) -> str:
    while True:
        run, snapshot = look(folder)
        told = line(snapshot or Snapshot(0.0), NOTHING, 0.0)
        if run.state != RUNNING:
            return f"{run.state}: {run.why}" if run.why else f"{told} · {run.state}"
        if is_once:
            return told
        print(told, flush=True)
        time.sleep(PIPED_S)
