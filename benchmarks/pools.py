"""A `wide serve` on one host, and machines that join it from others by its invite, for benchmarks across namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.namespaces import Host

ROOT = Path(__file__).parents[1]
WIDE = [sys.executable, "-m", "wide"]


class Served:
    """A pool in `folder`, on `host`. `plain`: nothing is encrypted."""

    def __init__(self, folder: str, host: Host, job: str, *options: str, plain: bool = False) -> None:
        self.folder, self._plain = Path(folder), plain
        self.environment = os.environ | {"PYTHONPATH": str(ROOT), "WIDE_LOG": "silent"}
        self.environment |= {"XDG_STATE_HOME": f"{folder}/state", "XDG_CACHE_HOME": f"{folder}/cache"}
        serve = [
            *host.prefix,
            *WIDE,
            "serve",
            job,
            "--host",
            host.address,
            "--json",
            "--out",
            f"{folder}/run",
            *options,
        ]
        self.joined: list[subprocess.Popen[str]] = []
        self.process = self._started([*serve, *(["--insecure"] if plain else [])])
        self.address = f"{host.address}:9433"
        self.invite = self._invite()

    def _started(self, command: list[str], **environment: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=ROOT, env=self.environment | environment, stdout=pipe, stderr=pipe, text=True
        )

    def _invite(self) -> str:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.match(r" +wide join (wide1_\w+)", line):
                return found[1]
        raise SystemExit("wide serve ended before it said how to join")

    def how(self, job: str) -> list[str]:
        """The words behind `wide join`."""
        if not self._plain:
            return [self.invite, "--job", job]
        return [self.address, "--job", job, "--insecure", "--token-file", str(self.folder / "run" / "token")]

    def join(self, host: Host, job: str) -> None:
        self.start([*host.prefix, *WIDE, "join", *self.how(job)])

    def start(self, command: list[str], **environment: str) -> None:
        """Something that ends with the run."""
        self.joined.append(self._started(command, **environment))

    def asked(self, command: list[str]) -> tuple[int, dict[str, Any]]:
        """An exit code, and what was said as JSON."""
        done = subprocess.run(command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout) if done.returncode == 0 else {}

    def result(self) -> dict[str, Any]:
        """When the run is over; with the seconds of each step."""
        output, errors = self.process.communicate()
        for process in self.joined:
            process.communicate()
        if self.process.returncode:
            raise SystemExit(f"wide serve failed with {self.process.returncode}: {errors}")
        result: dict[str, Any] = json.loads(output)
        with contextlib.closing(sqlite3.connect(self.folder / "run" / "run.db")) as db:
            result["step_seconds"] = [seconds for (seconds,) in db.execute("SELECT seconds FROM steps ORDER BY step")]
        return result

    def close(self) -> None:
        for process in (self.process, *self.joined):
            process.kill()
            process.wait()
