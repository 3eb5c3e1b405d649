"""A node's first words: who it is, what it runs on, and its echoes to the coordinator's probe. Knows no training."""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from wide.config import Options, usable_cores
from wide.errors import BY_EXIT_CODE, ProtocolError, UsageError, WideError
from wide.job.settings import build
from wide.telemetry.process import machine
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.frames import Destinations, no_payload

HEADER_LIMIT = 64 << 20
PAYLOAD_LIMIT = 1 << 40  # a node trusts its coordinator
PROBE_LIMIT = 1 << 20

M = TypeVar("M", bound=say.Message)


@dataclass(frozen=True)
class Identity:
    """How a node introduces itself."""

    token: str
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
    hello = say.Hello(
        identity.token,
        identity.role,
        identity.name,
        socket.gethostname(),
        identity.pid,
        build(identity.device, threads),
        identity.key,
        machine() if identity.device.type == "cpu" else "",  # who computes elsewhere does not share cores
        max(1, usable_cores() // threads),
    )
    connection.send(hello)
    welcome = _expect(connection, say.Welcome)
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
    while not (probe := _expect(connection, say.Probe)).is_last:
        connection.send(probe, load)


def _expect(connection: Connection, kind: type[M]) -> M:
    message = connection.wait()
    if isinstance(message, say.Stop):
        raise BY_EXIT_CODE.get(message.exit_code, WideError)(message.why)
    if not isinstance(message, kind):
        raise ProtocolError("out of order", f"expected {kind.__name__}, got {type(message).__name__}")
    return message
