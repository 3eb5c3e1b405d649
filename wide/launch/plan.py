"""`wide plan`: measure a pool on this machine, or ask one that is running, and say how it should train."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from wide.config import Options, Sockets
from wide.errors import UsageError
from wide.job.spec import parts
from wide.launch.local import plan_file
from wide.launch.visit import enrolled, is_invite, target_of
from wide.transport.introduction import expect
from wide.wire.messages import Planned


def plan_job(spec: str, options: Options) -> dict[str, Any]:
    """Let a pool of this machine's nodes train for some seconds, in a folder that is thrown away."""
    if options.node_count == 0:
        raise UsageError("--nodes 0: there is nothing to plan without nodes")
    with tempfile.TemporaryDirectory() as folder:
        here = msgspec.structs.replace(options, strategy="auto", out=Path(folder) / "run", resume=None)
        plan: dict[str, Any] = msgspec.json.decode(plan_file(spec, here))
        return plan


def is_pool(target: str) -> bool:
    """Or is it a job's file?"""
    target = parts(target).place
    host, _, port = target.rpartition(":")
    return not Path(target).exists() and (is_invite(target) or (bool(host) and port.isdigit()))


def ask_pool(target: str, token_file: str | None, sockets: Sockets) -> dict[str, Any]:
    """What a running coordinator has measured."""
    connection, _ = enrolled(target_of(target, token_file, sockets), socket.gethostname(), role="planner")
    with contextlib.closing(connection):
        answer = expect(connection, Planned)
    plan: dict[str, Any] = msgspec.json.decode(answer.plan)
    return plan
