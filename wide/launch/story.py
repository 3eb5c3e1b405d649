"""run.json: a run's story, for people and tools: what was started, with which program, on which machine, how it ended.

One entry for each process that coordinated the run; written whole, so that a kill leaves the last one readable.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import socket
import time
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from wide.config import Options, usable_cores
from wide.errors import Interrupted, StartsAgain, WideError
from wide.job import isa
from wide.job.spec import arguments_of, parts, split_spec, with_arguments, with_told, written
from wide.store.sessions import FILE, SCHEMA, plain, sessions
from wide.telemetry.log import log

MOST_SOURCE_CHARS = 1 << 20


class Story:
    """Of the run in `folder`. `job` is the spec of its file, or empty if it has none; `values` are those that the job's
    function was called with.
    """

    def __init__(
        self, folder: Path, command: list[str], job: str, options: Options, version: str, values: dict[str, Any]
    ) -> None:
        self._path = folder / FILE
        self._sessions = sessions(folder)
        source = _source(job)
        self._tell_changes(source)
        self._tell_values(set_of(folder), values)
        self._tell_isa(isa_of(folder))
        self._sessions.append(
            {
                "state": "running",
                "began_at": time.time(),
                "command": command,
                "options": {name: plain(getattr(options, name)) for name in options.__struct_fields__},
                "job": source,
                "set": values,
                "versions": {
                    "wide": version,
                    "python": platform.python_version(),
                    "torch": importlib.metadata.version("torch"),
                    "numpy": importlib.metadata.version("numpy"),
                },
                "machine": {
                    "host": socket.gethostname(),
                    "platform": platform.platform(),
                    "cores": usable_cores(),
                    "pid": os.getpid(),
                    "isa": str(isa.now()),
                },
            }
        )
        self._write()

    def _tell_changes(self, source: dict[str, Any] | None) -> None:
        """A run may go on with a program that was mended; but not without a word."""
        before = next((session["job"] for session in reversed(self._sessions) if session.get("job")), None)
        if before is None or source is None:
            return
        if (old := before.get("arguments", [])) != source["arguments"]:
            was = f"-- {' '.join(old)}" if old else "none"
            log.warning("the job's arguments are not as they were when this run was last trained (%s)", was)
        if before.get("sha256") == source.get("sha256"):
            return
        pairs = zip_longest(before.get("source", "").splitlines(), source.get("source", "").splitlines())
        line = next((number for number, (old, new) in enumerate(pairs, 1) if old != new), 1)
        log.warning("%s, line %d, is not as it was when this run was last trained", source["file"], line)

    def _tell_values(self, before: dict[str, Any], values: dict[str, Any]) -> None:
        if self._sessions and before == values and values:
            log.info("it goes on with %s", written(values))
        elif self._sessions and before != values:
            was = written(before) or "none"
            log.warning("the job's values are not as they were when this run was last trained (%s)", was)

    def _tell_isa(self, before: isa.Isa | None) -> None:
        if before is not None and before != (now := isa.now()):
            words = "this run was trained with %s until now and goes on with %s: its bits are those of neither alone"
            log.warning(words, before, now)

    def ended(self, why: str) -> None:
        self._end("done", why)

    def failed(self, error: BaseException) -> None:
        """What went wrong, and where: also in log.jsonl, for whoever looks there first."""
        details = error.details if isinstance(error, WideError) else ""
        is_stopped = isinstance(error, Interrupted | KeyboardInterrupt | StartsAgain)
        state = "interrupted" if is_stopped else "failed"
        if isinstance(error, StartsAgain):
            self._sessions[-1]["machine"]["isa"] = error.isa  # that it goes on with
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


def spec_of(folder: Path) -> str:
    """Where the job of the run in that folder was, as `file.py:name`; empty if that is not known."""
    for session in reversed(sessions(folder)):
        if job := session.get("job"):
            spec = f"{job.get('path', job['file'])}:{job.get('name', 'job')}"
            spec = str(replace(parts(spec), module=str(job.get("module", ""))))
            return with_told(with_arguments(spec, job.get("arguments", [])), set_of(folder))
    return ""


def set_of(folder: Path) -> dict[str, Any]:
    """The values that the function of its job was called with, last time."""
    for session in reversed(sessions(folder)):
        if isinstance(values := session.get("set"), dict):
            return {name: value for name, value in values.items() if name.isidentifier()}
    return {}


def isa_of(folder: Path) -> isa.Isa | None:
    """The instruction set that it was last trained with, if that is known."""
    found = sessions(folder)
    return isa.parse(str(found[-1].get("machine", {}).get("isa", ""))) if found else None


def asked(folder: Path) -> dict[str, Any]:
    """The options that the run was begun with, as far as they were given."""
    found = sessions(folder)
    return dict(found[0].get("options", {})) if found else {}


def is_unfinished(folder: Path) -> bool:
    found = sessions(folder)
    return bool(found) and found[-1].get("state") != "done"


def _source(spec: str) -> dict[str, Any] | None:
    if not spec:
        return None
    job, name = split_spec(spec)
    where: dict[str, Any] = {"file": str(job), "path": str(job.absolute()), "name": name}
    where["arguments"] = arguments_of(spec)
    if module := parts(spec).module:
        where["module"] = module
    try:
        text = job.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return where
    digest = hashlib.sha256(text.encode()).hexdigest()
    return where | {"sha256": digest, "source": text[:MOST_SOURCE_CHARS]}
