"""What `chaos` breaks: a coordinator, its nodes, its disk; and what it watches, the ledger. Knows processes and files;
nothing of when and why they are hit.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from wide.launch.processes import Children

ROOT = Path(__file__).parents[1]
DISK_MB = 256  # run.db and three checkpoints of ten minutes stay far below
LOOK_S = 0.2
CHECKPOINT_EVERY_S = 2
STOP_S = 60.0
INTERRUPTED = 143


class Disk:
    """Where the run is kept, with a switch that fills it. A tmpfs if we may mount one; else the coordinator is
    forbidden to write, which looks much the same to it (EFBIG instead of ENOSPC).
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.is_full = folder, False
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(folder)]
        try:
            self.is_mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:
            self.is_mounted = False
        self._ballast = folder / "ballast"

    def fill(self, pid: int) -> None:
        """Again and again, as long as it shall be full: whoever removes something would make room."""
        self.is_full = True
        if not self.is_mounted:
            _limit_writes(pid, 0)
            return
        with contextlib.suppress(OSError), open(self._ballast, "ab", buffering=0) as file:
            free = os.statvfs(self.folder).f_bavail * os.statvfs(self.folder).f_frsize
            if free:
                os.posix_fallocate(file.fileno(), file.tell(), free)

    def free(self, pid: int) -> None:
        self.is_full = False
        self._ballast.unlink(missing_ok=True)
        if not self.is_mounted:
            _limit_writes(pid, None)

    def close(self) -> None:
        if self.is_mounted:
            self._ballast.unlink(missing_ok=True)
            is_gone = subprocess.run(["umount", str(self.folder)], capture_output=True, check=False).returncode == 0
            if not is_gone:
                subprocess.run(["umount", "-l", str(self.folder)], check=True)


def _limit_writes(pid: int, nbytes: int | None) -> None:
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most if nbytes is None else nbytes, most))


class Coordinator:
    """The real command, on the same port whenever it is started."""

    def __init__(self, job: Path, run_dir: Path, log: Path, strategy: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port: int = free.getsockname()[1]
        self._command = [sys.executable, "-m", "wide", "serve", str(job), "--port", str(self.port), "--json"]
        self._command += ["--out", str(run_dir), "--resume", "auto", "--checkpoint-every", str(CHECKPOINT_EVERY_S)]
        self._command += ["--strategy", strategy, "--keep", "2"]
        self._log = log
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                self._command, stdout=subprocess.DEVNULL, stderr=log, env=plain_environment(with_token=True)
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """As a person would; returns its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_S)


class Nodes:
    """One process per slot, each `wide join` through its own link; forked from a server that has torch loaded."""

    def __init__(self, ports: list[int], job: Path, log: Path) -> None:
        self._ports, self._job, self._log = ports, job, log
        self._children = Children()
        self.processes: dict[int, BaseProcess] = {}

    def start(self, slot: int) -> None:
        arguments = (f"127.0.0.1:{self._ports[slot]}", str(self._job), f"slot-{slot}", str(self._log))
        self.processes[slot] = self._children.start("faults.chaos_pool", "be_node", *arguments)

    def is_alive(self, slot: int) -> bool:
        return slot in self.processes and self.processes[slot].is_alive()

    def signal(self, slot: int, number: signal.Signals) -> int:
        """Returns whom it was sent to."""
        pid = self.processes[slot].pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        return pid

    def close(self) -> None:
        for slot in self.processes:
            if self.is_alive(slot):
                self.signal(slot, signal.SIGKILL)  # reaches the stopped ones too
        for process in self.processes.values():
            process.join(STOP_S)


def be_node(address: str, job: str, name: str, log: str) -> None:
    """In a process of its own: join that pool until it ends, or whoever started this one is gone."""
    from wide.cli.main import main

    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(fd, stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.exit(main(["join", address, "--job", job, "--name", name]))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


class Merges(threading.Thread):
    """When something was merged, copied from the live ledger: a coordinator that resumes deletes rows."""

    def __init__(self, database: Path) -> None:
        super().__init__(name="merges", daemon=True)
        self.times: list[float] = []
        self._database, self._is_over = database, threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        newest, found = self.times[-1] if self.times else 0.0, []
        query = "SELECT committed_at FROM ledger ORDER BY rowid DESC"
        with (
            contextlib.suppress(sqlite3.Error),  # it is just being made, or the disk is full
            closing(sqlite3.connect(f"file:{self._database}?mode=ro", uri=True)) as db,
        ):
            for (at,) in db.execute(query):
                if at <= newest:
                    break
                found.append(at)
            self.times += sorted(found)

    def wait_for_one_after(self, began: float, timeout_s: float) -> bool:
        deadline = time.time() + timeout_s
        while not (self.times and self.times[-1] > began):
            if time.time() > deadline:
                return False
            time.sleep(LOOK_S)
        return True

    def close(self) -> None:
        self._is_over.set()
        self.join()


def plain_environment(with_token: bool = False) -> dict[str, str]:
    """Without our own wishes, and without naps: the reference and the coordinator compute what they compute."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("WIDE_", "CHAOS_"))}
    token = {"WIDE_TOKEN": os.environ["WIDE_TOKEN"]} if with_token else {}
    return kept | {"PYTHONPATH": str(ROOT)} | token
