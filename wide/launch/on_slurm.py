"""`wide run --on slurm`: the coordinator in this process, nodes as a job array. Knows Slurm's own commands (sbatch,
scontrol, sinfo, squeue, scancel); what they are told and what they answer is in slurm.py.

The invite is in the run's folder, in a file that only its owner can read. Whatever becomes of this process, a child of
it, which waits for its end, takes the array out of the queue.
"""

from __future__ import annotations

import functools
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

from wide.config import Options
from wide.errors import Unreachable, UsageError
from wide.job.spec import split_spec, title_of
from wide.launch.invites import FIRST
from wide.launch.keys import write_secret
from wide.launch.places import private
from wide.launch.processes import GRACE_S
from wide.launch.result import Result
from wide.launch.serve import Serving, serve
from wide.launch.slurm import (
    LOGS,
    SEEN_FORMAT,
    Staying,
    Task,
    machines_of,
    node_count,
    nodes_script,
    plain_name,
    tasks_of,
    why_over,
    why_waiting,
)
from wide.telemetry.log import log
from wide.transport.endpoint import Endpoint

SCRIPT = "nodes.sbatch"
ANSWER_S = 60.0  # Slurm's own commands give up after some 30
LOOK_EVERY_S = 5.0
CANCEL = 'read -r _; exec scancel --quiet --name="$1"'
FORGOTTEN = "Invalid job id"
AWAY = re.compile("contact slurm|connect failure|not responding|authentication|resolve|timed out", re.IGNORECASE)


def run(spec: str, options: Options, address: str) -> Result:
    """Looks at the cluster first: what cannot be is said before anything is loaded."""
    count = node_count(
        machines_of(_answer("sinfo", "--all", "--noheader", "--Node", f"--format={SEEN_FORMAT}")), options
    )
    name = f"wide-{plain_name(title_of(split_spec(spec)[0]))}-{secrets.token_hex(3)}"
    return serve(spec, options, Serving(), functools.partial(SlurmNodes, options, count, name))


class SlurmNodes:
    """A job array of `count` nodes."""

    is_open, is_here, may_fork = True, False, True

    def __init__(self, options: Options, count: int, name: str, invite: str, folder: Path) -> None:
        self._options, self._count, self._name, self._invite = options, count, name, invite
        self._folder = folder.absolute()
        self._array = self._why_waiting = ""
        self._guard: Guard | None = None
        self._watch = Watch()

    def start(self, endpoint: Endpoint) -> None:
        try:
            self._submit()
        except BaseException:
            self.close()
            raise

    def _submit(self) -> None:
        logs = private(self._folder / LOGS)
        write_secret(self._folder / FIRST, self._invite + "\n")
        text = nodes_script(self._options, self._count, self._name, self._folder / FIRST, logs, Staying())
        script = self._folder / SCRIPT
        script.write_text(text, encoding="utf-8")
        self._guard = Guard(self._name)
        answer = _answer("sbatch", "--parsable", str(script), keeps=(self._guard.end,))
        self._array = answer.strip().partition(";")[0]
        if self._options.log != "silent":
            count = f"{self._count} node{'s' * (self._count != 1)}"
            print(f"Slurm is asked for {count}: job array {self._array}, logs in {logs}", file=sys.stderr, flush=True)

    def trouble(self) -> str:
        """Asked several times a second, so it never waits for Slurm's answer."""
        tasks = self._watch.look(self._array)
        if tasks is None:
            return ""
        if (why := why_waiting(tasks)) and why != self._why_waiting:
            log.info("Slurm lets nodes wait: %s", why)
        self._why_waiting = why
        return why_over(tasks, self._folder)

    def are_done(self) -> bool:
        return False

    def close(self) -> None:
        """Nodes that have heard that the run is over leave by themselves; whatever is left then is cancelled."""
        self._watch.close()
        if self._guard is None:
            return
        if self._array:
            _tried("scancel", "--quiet", "--state=PENDING", self._array)
            deadline = time.monotonic() + GRACE_S
            while time.monotonic() < deadline and _tried("squeue", "--noheader", "--jobs", self._array):
                time.sleep(0.2)
        self._guard.close()
        self._guard = None


class Guard:
    """A process that cancels the job array `name` when `end`, the end of a pipe, is closed by all who have it: this
    process, however it ends, and an sbatch that it may have left in the middle.
    """

    def __init__(self, name: str) -> None:
        waiting, self.end = os.pipe()
        try:  # in a session of its own, where Ctrl-C is not heard
            self._process = subprocess.Popen(
                ["sh", "-c", CANCEL, "wide", name],
                stdin=waiting,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            os.close(waiting)

    def close(self) -> None:
        os.close(self.end)
        self._process.wait()


class Watch:
    """Looks at an array again and again, in a process beside."""

    def __init__(self) -> None:
        self._asking: subprocess.Popen[str] | None = None
        self._answer: IO[str] = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._asked_at = time.monotonic()

    def look(self, array: str) -> list[Task] | None:
        """The tasks, if there is an answer that is new."""
        if self._asking is None:
            if time.monotonic() - self._asked_at > LOOK_EVERY_S:
                self._ask(array)
            return None
        if (code := self._asking.poll()) is None:
            return None
        self._asking = None
        self._answer.seek(0)
        answer = self._answer.read()
        return tasks_of(answer) if code == 0 or FORGOTTEN in answer else None  # or Slurm itself is away for a while

    def _ask(self, array: str) -> None:
        self._asked_at = time.monotonic()
        self._answer.seek(0)
        self._answer.truncate()
        words = ["scontrol", "--oneliner", "show", "job", array]
        self._asking = subprocess.Popen(
            words, stdout=self._answer, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )

    def close(self) -> None:
        if self._asking is not None:
            self._asking.kill()
            self._asking.wait()
        self._answer.close()


def _answer(*words: str, keeps: tuple[int, ...] = ()) -> str:
    """What one of Slurm's commands says. It has `keeps` open as long as it runs."""
    if shutil.which(words[0]) is None:
        raise UsageError(
            f"--on slurm needs Slurm's own commands, and there is no {words[0]} here: run it where there is"
        )
    environment = {name: value for name, value in os.environ.items() if name not in ("WIDE_TOKEN", "WIDE_INVITE")}
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=ANSWER_S,
            pass_fds=keeps,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{words[0]} has no answer after {ANSWER_S:.0f} s: is the cluster's slurmctld up?") from None
    if done.returncode:
        said = (
            "; ".join(line.split("error: ")[-1] for line in done.stderr.splitlines()) or f"exit code {done.returncode}"
        )
        raise (Unreachable if AWAY.search(said) else UsageError)(f"{words[0]} says: {said}")
    return done.stdout


def _tried(*words: str) -> str:
    """What it says; nothing, if it cannot."""
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=ANSWER_S, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
