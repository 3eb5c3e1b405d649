"""`wide join`: this machine works for a pool until the pool is done."""

from __future__ import annotations

import functools
import os
import signal
import socket
from dataclasses import dataclass
from types import FrameType

from wide.config import Sockets
from wide.errors import Interrupted
from wide.job.loading import load, split_spec
from wide.launch.token import read_token
from wide.node.greeting import Identity, pick_device
from wide.node.membership import Membership, raise_for
from wide.node.session import Left
from wide.telemetry.log import log, logging_to
from wide.transport.endpoint import endpoint
from wide.transport.tcp import SILENCE_S

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
    pool = endpoint(joining.address, read_token(joining.token_file), joining.sockets)
    job = load(joining.job)
    identity = Identity(pool.token, joining.name or socket.gethostname(), os.getpid(), pick_device(joining.device))
    membership = Membership(functools.partial(pool.dial, SILENCE_S), identity, lambda: job, split_spec(joining.job)[0])
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
