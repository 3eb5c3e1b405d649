"""A node's first words: who it is, what it runs on, and its echoes to the coordinator's probe. Knows no training."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field

import torch

from wide.config import Options, usable_cores
from wide.errors import UsageError
from wide.job import isa
from wide.job.settings import build
from wide.telemetry.process import machine
from wide.transport.connection import Connection
from wide.transport.introduction import Self, expect, say_hello
from wide.wire import messages as say
from wide.wire.frames import Destinations, no_payload
from wide.wire.proof import Credential

HEADER_LIMIT = 64 << 20
PAYLOAD_LIMIT = 1 << 40  # a node trusts its coordinator
PROBE_LIMIT = 1 << 20


@dataclass(frozen=True)
class Identity:
    """How a node introduces itself."""

    credential: Credential
    name: str
    pid: int
    device: torch.device
    role: str = "node"
    key: str = field(default_factory=lambda: secrets.token_hex(16))  # the same as long as this process lives


def pick_device(wish: str, index: int = 0) -> torch.device:
    """`auto` takes a GPU if there is one; the nodes of one machine take turns over its GPUs."""
    if wish != "auto":
        device = torch.device(wish)
        if device.type != "cpu" and not torch.get_device_module(device).is_available():
            raise UsageError(f"--device {wish}: there is no such device on this machine; --device auto takes what is")
        return device
    if torch.cuda.is_available():
        return torch.device("cuda", index % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def default_nodes(options: Options) -> int:
    """One node for each accelerator, if nodes compute there; otherwise one for each core."""
    if options.nodes is not None or pick_device(options.device).type == "cpu":
        return options.node_count
    return torch.cuda.device_count() if options.device in ("auto", "cuda") and torch.cuda.is_available() else 1


def introduce(connection: Connection, identity: Identity, threads: int) -> say.Welcome:
    who = Self(
        identity.role,
        identity.name,
        socket.gethostname(),
        identity.pid,
        build(identity.device, threads),
        identity.key,
        machine() if identity.device.type == "cpu" else "",  # who computes elsewhere does not share cores
        max(1, usable_cores() // threads),
        str(isa.now()),
        str(isa.best_here()),
        identity.device.type,
    )
    say_hello(connection, identity.credential, who)
    welcome = expect(connection, say.Welcome)
    if identity.role == "node":
        _echo(connection)
    return welcome


def _echo(connection: Connection) -> None:
    """Say probes back, payload and all: before anything else can make this process slow."""
    load = memoryview(b"")

    def place_for(message: say.Message, nbytes: int) -> Destinations:
        nonlocal load
        if not isinstance(message, say.Probe):
            return no_payload(message, nbytes)
        load = memoryview(bytearray(nbytes))
        return (load,)

    connection.reader.allow(place_for, HEADER_LIMIT, PROBE_LIMIT)
    while not (probe := expect(connection, say.Probe)).is_last:
        connection.send(probe, load)
