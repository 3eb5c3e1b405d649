"""run.json: a run's story, for people and tools: what was started, with which program, on which machine, how it ended.

One entry for each process that coordinated the run; written whole, so that a kill leaves the last one readable.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from wide.config import Options, usable_cores
from wide.errors import Interrupted, WideError
from wide.telemetry.log import log

FILE = "run.json"
SCHEMA = "wide.run/1"
MOST_SOURCE_CHARS = 1 << 20


class Story:
    """Of the run in `folder`. `job` is the file's spec, if the job has a file."""

    def __init__(self, folder: Path, command: list[str], job: Path | None, options: Options, version: str) -> None:
        self._path = folder / FILE
        self._sessions = _read(self._path)
        self._sessions.append(
            {
                "state": "running",
                "began_at": time.time(),
                "command": command,
                "options": {name: _plain(getattr(options, name)) for name in options.__struct_fields__},
                "job": _source(job),
                "versions": {
                    "wide": version,
                    "python": platform.python_version(),
                    "torch": torch.__version__,
                    "numpy": np.__version__,
                },
                "machine": {
                    "host": socket.gethostname(),
                    "platform": platform.platform(),
                    "cores": usable_cores(),
                    "instructions": torch.backends.cpu.get_cpu_capability(),
                    "pid": os.getpid(),
                },
            }
        )
        self._write()

    def ended(self, why: str) -> None:
        self._end("done", why)

    def failed(self, error: BaseException) -> None:
        """What went wrong, and where: also in log.jsonl, for whoever looks there first."""
        details = error.details if isinstance(error, WideError) else ""
        state = "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
        why = str(error) or type(error).__name__
        log.error("%s", why, extra={"is_for_file": True, "fields": {"state": state, "details": details}})
        self._end(state, why, details)

    def _end(self, state: str, why: str, details: str = "") -> None:
        self._sessions[-1] |= {"state": state, "ended_at": time.time(), "why": why, "details": details}
        self._write()

    def _write(self) -> None:
        temporary = self._path.with_name(f".{FILE}")
        try:
            temporary.write_text(json.dumps({"schema": SCHEMA, "sessions": self._sessions}, indent=1), encoding="utf-8")
            os.replace(temporary, self._path)
        except OSError as error:  # a full disk: the run itself is more important
            log.warning("%s is not written: %s", self._path, error)


def _read(path: Path) -> list[dict[str, Any]]:
    """What earlier processes wrote; nothing, if that cannot be read."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return [dict(session) for session in told["sessions"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _source(job: Path | None) -> dict[str, Any] | None:
    if job is None:
        return None
    try:
        text = job.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return {"file": str(job)}
    digest = hashlib.sha256(text.encode()).hexdigest()
    return {"file": str(job), "sha256": digest, "source": text[:MOST_SOURCE_CHARS]}


def _plain(value: Any) -> Any:
    return value if isinstance(value, int | float | str | None) else str(value)
