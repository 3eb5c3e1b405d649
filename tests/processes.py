"""Starting the real command, and making sure that nothing of it stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parent.parent
PATIENCE_S = 120.0  # nothing here takes this long; a hang must end somehow


def environment(**changes):
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("WIDE_")}
    return quiet | {"PYTHONPATH": str(ROOT)} | changes


@contextmanager
def started(*arguments, cwd, stderr=subprocess.PIPE, **changes):
    """A running `wide …` in a session of its own; whatever it started is gone afterwards, or the test fails."""
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, "-m", "wide", *map(str, arguments)],
        cwd=cwd,
        env=environment(WIDE_TEST_MARK=mark, **changes),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,
    )
    process.mark = mark
    try:
        yield process
    except BaseException:
        for stray in relatives(mark):
            stray.kill()
        raise
    finally:
        is_clean = until(lambda: not relatives(mark), seconds=20)
        for stray in relatives(mark):
            stray.kill()
        process.communicate()
        assert is_clean, "processes were left behind"


def wide(*arguments, cwd, **changes):
    """Run the command to its end: (exit code, stdout, stderr)."""
    with started(*arguments, cwd=cwd, **changes) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
    return process.returncode, out, err


def python(*arguments, cwd=ROOT, **changes):
    """Run Python to its end, as a script's user would."""
    command = [sys.executable, *map(str, arguments)]
    env = environment(**changes)
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=PATIENCE_S)


def result_of(*arguments, cwd, **changes):
    code, out, err = wide(*arguments, "--json", cwd=cwd, **changes)
    assert code == 0, err
    return json.loads(out)


def relatives(mark):
    """Every process that inherited this test's mark: children, nodes, forkservers."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("WIDE_TEST_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def until(condition, seconds=PATIENCE_S):
    """Wait for a condition, looking often; False if it did not come true in time."""
    deadline, pause = time.monotonic() + seconds, threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            return False
        pause.wait(0.05)
    return True
