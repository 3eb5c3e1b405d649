"""`wide join`: this machine works for a pool until the pool is done."""

from __future__ import annotations

import functools
import os
import signal
import socket
from dataclasses import dataclass
from types import FrameType

from wide.config import Sockets
from wide.errors import Interrupted, UsageError
from wide.job.loading import load
from wide.launch.token import read_token
from wide.node.greeting import Identity, pick_device
from wide.node.membership import Membership, raise_for
from wide.node.worker import Left
from wide.telemetry.log import log, logging_to
from wide.transport.connection import Connection
from wide.transport.tcp import SILENCE_S, connect

RETRY_S = 3600.0  # how long a pool is looked for that went away


@dataclass(frozen=True)
class Joining:
    """What `wide join` was told."""

    address: str
    job: str
    token_file: str | None
    name: str | None
    device: str
    log: str
    sockets: Sockets
    retry_s: float = RETRY_S


def join(joining: Joining) -> int:
    """Returns the exit code the coordinator asked for."""
    address, token_file, sockets = joining.address, joining.token_file, joining.sockets
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(f"{address}: expected HOST:PORT, as `wide serve` printed it")
    token = read_token(token_file)
    if not token:
        raise UsageError("no token: set WIDE_TOKEN or give --token-file, with the token of `wide serve`")
    job = load(joining.job)
    identity = Identity(token, joining.name or socket.gethostname(), os.getpid(), pick_device(joining.device))
    dial = functools.partial(connect, host.strip("[]"), int(port), sockets, silence_s=SILENCE_S)
    membership = Membership(lambda: Connection(dial()), identity, lambda: job)
    signals: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        """The first time politely, if there is work to be handed in; the second time at once."""
        signals.append(number)
        if len(signals) > 1:
            raise Interrupted("left the pool", number)
        membership.leave("it was told to leave")

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    with logging_to(joining.log):
        try:
            stop = membership.last(joining.retry_s)
        except Left:
            raise Interrupted("left the pool", signals[0]) from None
        log.info("%s", stop.why)
    raise_for(stop)
    return 0
