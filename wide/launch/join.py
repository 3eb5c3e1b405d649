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
from wide.node.greeting import Identity, pick_device
from wide.node.worker import Left, Worker, lend
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

    workers: list[Worker] = []
    signals: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        """The first time politely, if there is work to be handed in; the second time at once."""
        signals.append(number)
        if not workers or len(signals) > 1:
            raise Interrupted("left the pool", number)
        workers[0].leave("it was told to leave")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    with logging_to(tier):
        connection = Connection(connect(host.strip("[]"), int(port), sockets))
        identity = Identity(token, name or socket.gethostname(), os.getpid(), pick_device(device))
        try:
            stop = lend(connection, identity, lambda: job, begun=workers.append)
        except Left:
            raise Interrupted("left the pool", signals[0]) from None
        log.info("%s", stop.why)
    if stop.exit_code:
        raise BY_EXIT_CODE.get(stop.exit_code, WideError)(stop.why)
    return 0
