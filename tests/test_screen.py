"""A run on a real terminal: the screen that lives, signals at any moment, a terminal that takes nothing any more."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import termios
import threading
import time
from multiprocessing import Pipe

import pytest

from tests.processes import PATIENCE_S, environment, until
from wide.launch.relay import Relay, seen
from wide.telemetry.snapshot import Snapshot

pytestmark = pytest.mark.processes

JOB = """
import faulthandler, sys, torch, wide
from torch import nn

def model():
    faulthandler.enable()  # which wants a file, not only a stream
    print("a word of the user's", file=sys.stderr)
    sys.stderr.writelines(["and ", "another\\n"])
    return nn.Linear(4, 2)

job = wide.Job(
    model=model, loss=wide.supervised(nn.CrossEntropyLoss()), optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
    dataset=lambda: torch.utils.data.TensorDataset(torch.randn(64, 4), torch.zeros(64, dtype=torch.long)),
    batch_size=4, batches_per_step=4, steps=10**9, seed=1,
)
"""


class Terminal:
    """A command on a terminal of its own, which somebody reads, or not."""

    def __init__(self, folder, *arguments, size=(24, 80), job=JOB):
        (folder / "job.py").write_text(job)
        self.folder, self.text, self.is_read = folder, b"", True
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
        command = [sys.executable, "-m", "wide", *arguments]
        env = environment(TERM="xterm-256color")
        self.process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self):
        with contextlib.suppress(OSError):
            while True:
                if self.is_read and select.select([self._ours], [], [], 0.05)[0]:
                    self.text += os.read(self._ours, 65536)
                elif not self.is_read:
                    time.sleep(0.05)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.is_read = True
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE_S)

    def end(self):
        return self.process.wait(PATIENCE_S)


def state(folder):
    with contextlib.suppress(OSError, ValueError):
        return json.loads((folder / "run.json").read_text())["sessions"][-1]["state"]
    return None


def test_a_screen_lives_and_goes(tmp_path):
    with Terminal(tmp_path, "run", "job.py", "--nodes", "2", "--seconds", "3", "--out", "run") as terminal:
        assert terminal.end() == 0
        text = terminal.text.decode()
    assert "job" in text
    assert "batches/s" in text
    assert "node" in text
    assert "a word of the user's" in text
    assert "and another" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is back"
    assert "weights" in text[text.rindex("\x1b[?25h") :]


@pytest.mark.parametrize("after_s", [0.7, 1.4, 2.1])
def test_ctrl_c_is_heard_at_any_moment(tmp_path, after_s):
    """While torch is loaded, the coordinator may not hear it yet: it is asked again."""
    with Terminal(tmp_path, "run", "job.py", "--nodes", "2", "--out", "run") as terminal:
        time.sleep(after_s)  # a moment, not a wait: any will do
        terminal.process.send_signal(signal.SIGINT)
        assert terminal.end() == 130
        assert b"interrupted" in terminal.text


def test_a_terminal_that_takes_nothing_does_not_keep_a_run_from_ending(tmp_path):
    options = ("--nodes", "2", "--seconds", "4", "--out", "run")
    with Terminal(tmp_path, "run", "job.py", *options) as terminal:
        assert until(lambda: b"batches/s" in terminal.text)
        terminal.is_read = False
        assert until(lambda: state(tmp_path / "run") == "done"), state(tmp_path / "run")


def test_top_shows_a_run_of_another_process(tmp_path):
    with Terminal(tmp_path, "run", "job.py", "--nodes", "2", "--seconds", "600", "--plain", "--out", "run") as run:
        live = "SELECT json_extract(snapshot, '$.step') FROM live"
        assert until(lambda: (_query(tmp_path / "run" / "run.db", live) or [(0,)])[0][0] > 10)
        with Terminal(tmp_path, "top", "run") as top:
            assert until(lambda: b"batches/s" in top.text)
            top.process.send_signal(signal.SIGINT)
            assert top.end() == 0
            assert until(lambda: b"\x1b[?1049l" in top.text), "the reader is a thread of its own"
            assert top.text.rindex(b"\x1b[?1049l") > top.text.rindex(b"\x1b[?1049h"), "the screen is given back"
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130


def _query(path, query):
    with contextlib.suppress(sqlite3.Error), contextlib.closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()
    return []


def test_words_wait_for_nobody():
    """The other side of the pipes is stopped: whoever trains goes on, and of pictures the newest is kept."""
    (words, say), (screen, show) = Pipe(duplex=False), Pipe(duplex=False)
    relay = Relay(say, show)
    relay.start()
    for i in range(20_000):
        relay.write(f"line {i}\n")
        relay.post(Snapshot(float(i)), ("", 0.0))
    relay.finish()
    assert words.recv_bytes().startswith(b"line ")
    while screen.poll():
        run, _ = seen(screen.recv_bytes())
    assert run.at >= 0.0


def test_nodes_that_speak_at_the_same_time_do_not_garble_each_other(tmp_path):
    """They are forked, and have the same pipe."""
    told = "x" * 5000
    text = JOB.replace("return nn.Linear(4, 2)", f'print("{told}", file=sys.stderr); return nn.Linear(4, 2)')
    text = text.replace(
        "job = wide.Job(",
        "def loss(model, batch):\n    print('computing', file=sys.stderr)\n"
        "    return nn.functional.cross_entropy(model(batch[0]), batch[1])\n\njob = wide.Job(",
    )
    text = text.replace("loss=wide.supervised(nn.CrossEntropyLoss())", "loss=loss")
    options = ("--nodes", "3", "--seconds", "3", "--out", "run")
    with Terminal(tmp_path, "run", "job.py", *options, job=text) as terminal:
        assert terminal.end() == 0
    assert b"computing" in terminal.text
