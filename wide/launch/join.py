"""`wide join`: this machine works for a pool until the pool is done."""

from __future__ import annotations

import os
import signal
import socket
from types import FrameType

from wide.config import Sockets
from wide.errors import BY_EXIT_CODE, Interrupted, UsageError, WideError
from wide.job.loading import load
from wide.launch.token import read_token
from wide.node.worker import Identity, lend, pick_device
from wide.telemetry.log import log, logging_to
from wide.transport.connection import Connection
from wide.transport.tcp import connect


def join(
    address: str, spec: str, token_file: str | None, name: str | None, device: str, tier: str, sockets: Sockets
) -> int:
    """Returns the exit code the coordinator asked for."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{address}: expected HOST:PORT, as `wide serve` printed it")
    token = read_token(token_file)
    if not token:
        raise UsageError("no token: set WIDE_TOKEN or give --token-file, with the token of `wide serve`")
    job = load(spec)

    def leave(number: int, frame: FrameType | None) -> None:
        raise Interrupted("left the pool", number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    with logging_to(tier):
        connection = Connection(connect(host.strip("[]"), int(port), sockets))
        identity = Identity(token, name or socket.gethostname(), os.getpid(), pick_device(device))
        stop = lend(connection, identity, lambda: job)
        log.info("%s", stop.why)
    if stop.exit_code:
        raise BY_EXIT_CODE.get(stop.exit_code, WideError)(stop.why)
    return 0
