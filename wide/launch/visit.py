"""The way to a pool: from what somebody pasted to an endpoint, and a first visit, by which a machine is enrolled and
sees what is trained there. Does not import torch.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from wide.config import Sockets
from wide.errors import ConnectionLost, NotYet, Refused, Unreachable, UsageError
from wide.launch.code import MOST_NBYTES
from wide.launch.guard import UP, TimeIsUp
from wide.launch.memories import Memory, recall, remember
from wide.launch.token import read_token
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.endpoint import Endpoint, endpoint, of_invite
from wide.transport.introduction import Self, expect, say_hello
from wide.wire import messages as say
from wide.wire.frames import Destinations, Sink, no_payload
from wide.wire.invite import PREFIX, Invite, parse

VISIT_S = 30.0  # of silence
LONGEST_PAUSE_S = 3.0
ECHOES = 16
VARIABLE = "WIDE_INVITE"

T = TypeVar("T")
Role = Literal["guest", "visitor"]


@dataclass(frozen=True)
class Target:
    """A pool that somebody named: by an invite, or by an address and a token."""

    endpoint: Endpoint
    invite: Invite | None = None

    @property
    def memory(self) -> Memory:
        return recall(self.endpoint.pin) if self.endpoint.pin else Memory()


@dataclass(frozen=True)
class Visit:
    """What a pool showed: what it trains, its code, and how wide the way to it seems to be."""

    offer: say.Offer
    payload: memoryview
    bytes_per_s: float
    delay_s: float
    pools_clock_ahead_s: float
    is_encrypted: bool
    address: str  # that answered

    @property
    def width(self) -> str:
        """Of the way, as far as a few echoes tell."""
        mbit = 8e-6 * self.bytes_per_s
        return "more than 1 Gbit/s" if mbit > 1000 else f"about {mbit:.2g} Mbit/s" if mbit else "a slow way"


def is_invite(text: str | None) -> bool:
    return text is None or text == "-" or text.startswith("@") or re.search(r"\bwide\d+_", text.lower()) is not None


def is_typed(text: str | None) -> bool:
    """Was it given as a word of the command? Then it is in the shell's history (cli/entry.py takes it out of sight)."""
    return text is not None and (text.lower().startswith(PREFIX) or text.startswith("@/dev/fd/"))


def read_invite(text: str | None) -> Invite:
    """`wide1_…`, `@file`, `-` for stdin, or nothing: then from the environment, or asked for without an echo."""
    if text == "-":
        text = sys.stdin.readline()
    elif text is not None and text.startswith("@"):
        text = _read(text[1:])
    elif text is None and not (text := os.environ.pop(VARIABLE, "")):
        if not (sys.stdin is not None and sys.stdin.isatty()):
            raise UsageError(f"no invite: give it, or {VARIABLE}, or `-` to read it from stdin, or `@file`")
        text = getpass.getpass("invite (wide1_…, not shown): ")
    return parse(text)


def _read(name: str) -> str:
    try:
        return Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"@{name}: {getattr(error, 'strerror', None) or error}") from None


def target_of(text: str | None, token_file: str | None, sockets: Sockets, is_insecure: bool = False) -> Target:
    if text is not None and not is_invite(text):
        return Target(endpoint(text, read_token(token_file), sockets, is_insecure))
    invite = read_invite(text)
    return Target(of_invite(invite, sockets), invite)


def enrolled(target: Target, name: str, role: str, sink: Sink = no_payload) -> tuple[Connection, Endpoint]:
    """A connection that has said hello, and the endpoint with the credential by which it was let in. A machine that was
    here before comes with its own key; who was not, is given one.
    """
    memory, invite = target.memory, target.invite
    first = memory.credential or target.endpoint.credential
    try:
        return _hello(msgspec.structs.replace(target.endpoint, credential=first), invite, name, role, sink)
    except Refused as refused:
        if memory.credential is None or invite is None:
            raise
        with contextlib.suppress(Refused):
            return _hello(target.endpoint, invite, name, role, sink)  # a new invite, or a key that was damaged
        raise refused from None


def _hello(pool: Endpoint, invite: Invite | None, name: str, role: str, sink: Sink) -> tuple[Connection, Endpoint]:
    connection = pool.dial(VISIT_S)
    connection.reader.allow(sink, 1 << 20, MOST_NBYTES)  # the answer may come in one breath with the proof
    try:
        known = say_hello(connection, pool.credential, Self(role, name, socket.gethostname(), os.getpid()))
    except BaseException:
        connection.close()
        raise
    if known.machine and invite is not None:
        memory = msgspec.structs.replace(recall(pool.pin), machine=known.machine, secret=known.secret, invite=invite.id)
        remember(pool.pin, memory)
        assert memory.credential is not None
        pool = msgspec.structs.replace(pool, credential=memory.credential)
    return connection, pool


def visit(target: Target, name: str, role: Role) -> tuple[Visit, Endpoint]:
    """What is there, and how to come in. A guest only looks; a visitor is one of the pool's machines from then on."""
    room = _Room()
    connection, pool = enrolled(target, name, role, room.place_for)
    with contextlib.closing(connection):
        offer = expect(connection, say.Offer)
        ahead_s = offer.at - time.time()
        delay_s, bytes_per_s = _measure(connection)
        is_encrypted = bool(connection.stream.binding)
        return Visit(offer, room.code, bytes_per_s, delay_s, ahead_s, is_encrypted, connection.address), pool


class _Room:
    """Where a pool's answers go."""

    code = memoryview(b"")

    def place_for(self, message: say.Message, nbytes: int) -> Destinations:
        room = memoryview(bytearray(nbytes))
        if isinstance(message, say.Offer):
            self.code = room
        return (room,) if nbytes else ()


def _measure(connection: Connection) -> tuple[float, float]:
    """Half of the echoes come back loaded: the quickest of each kind tell delay and width."""
    took: list[float] = []
    before = connection.bytes_received
    for i in range(ECHOES):
        if i == ECHOES // 2:
            before = connection.bytes_received
        began = time.perf_counter()
        connection.send(say.Probe())
        expect(connection, say.Probe)
        took.append(time.perf_counter() - began)
        if took[-1] > 1.0:
            break
    loaded = took[ECHOES // 2 :]
    if not loaded:
        return min(took) / 2, 0.0
    nbytes = (connection.bytes_received - before) / len(loaded)
    return min(took) / 2, nbytes / max(min(loaded) - min(took), 1e-6)


def patiently(deed: Callable[[], T], retry_s: float, until: float | None = None) -> T:
    """A pool that is not there yet is waited for; but not beyond `until`, by the clock on the wall."""
    deadline, pause_s, has_told, chance = time.monotonic() + retry_s, 0.1, False, random.SystemRandom()
    while True:
        try:
            return deed()
        except (Unreachable, ConnectionLost, NotYet) as error:
            if retry_s <= 0 or time.monotonic() > deadline:
                raise
            if not has_told:
                log.warning("%s; waiting for it", error)
            has_told = True
        if until is not None and time.time() >= until:
            raise TimeIsUp(UP)
        threading.Event().wait(pause_s * chance.uniform(0.5, 1.0))
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
