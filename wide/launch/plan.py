"""`wide plan`: measure a pool on this machine, or ask one that is running, and say how it should train."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from wide.config import Options, Sockets
from wide.errors import BY_EXIT_CODE, ProtocolError, UsageError, WideError
from wide.launch.local import plan_file
from wide.launch.token import read_token


def plan_job(spec: str, options: Options) -> dict[str, Any]:
    """Let a pool of this machine's nodes train for some seconds, in a folder that is thrown away."""
    if options.node_count == 0:
        raise UsageError("--nodes 0: there is nothing to plan without nodes")
    with tempfile.TemporaryDirectory() as folder:
        here = msgspec.structs.replace(options, strategy="auto", out=Path(folder) / "run", resume=None)
        plan: dict[str, Any] = msgspec.json.decode(plan_file(spec, here))
        return plan


def is_address(target: str) -> bool:
    host, _, port = target.rpartition(":")
    return bool(host) and port.isdigit() and not Path(target).exists()


def ask_pool(address: str, token_file: str | None, sockets: Sockets) -> dict[str, Any]:
    """What a running coordinator has measured."""
    from wide.transport.endpoint import endpoint
    from wide.wire import messages as say

    pool = endpoint(address, read_token(token_file), sockets)
    connection = pool.dial()
    try:
        connection.send(say.Hello(pool.token, "planner", "planner", socket.gethostname(), os.getpid(), ""))
        answer = connection.wait()
    finally:
        connection.close()
    if isinstance(answer, say.Stop):
        raise BY_EXIT_CODE.get(answer.exit_code, WideError)(answer.why)
    if not isinstance(answer, say.Planned):
        raise ProtocolError("out of order", f"{type(answer).__name__} instead of a plan")
    plan: dict[str, Any] = msgspec.json.decode(answer.plan)
    return plan
