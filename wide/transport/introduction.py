"""The first words of whoever dials: a knock, and a hello with the proof that it knows a secret. Then it is shown that
the other end does, too. Knows messages and proofs.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from wide.errors import BY_EXIT_CODE, OtherProgram, OtherSet, ProtocolError, Refused, VersionMismatch, WideError
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire import words
from wide.wire.proof import Credential, is_proven, nonce, proof

M = TypeVar("M", bound=say.Message)


class Self(msgspec.Struct, frozen=True):
    """Who dials, by its own words: what Hello says besides the proof."""

    role: str
    name: str
    host: str
    pid: int
    build: str = ""
    key: str = ""
    machine: str = ""
    cores: int = 0
    isa: str = ""
    best: str = ""
    device: str = ""


def knock(connection: Connection) -> None:
    """Is a pool there, and which protocol do both speak?"""
    mine = nonce()
    connection.send(say.Knock(say.PROTOCOL, mine))
    challenge = expect(connection, say.Challenge)
    if not say.OLDEST <= challenge.protocol <= say.PROTOCOL:
        raise VersionMismatch(f"the pool speaks protocol {challenge.protocol}, this side {say.PROTOCOL}")
    connection.protocol = challenge.protocol
    connection.nonces = mine, challenge.nonce


def hello(credential: Credential, who: Self, nonces: tuple[bytes, bytes], binding: bytes = b"") -> say.Hello:
    mine = proof(credential.secret, "node", credential.name, nonces, binding)
    return say.Hello(credential.name, mine, *msgspec.structs.astuple(who))


def say_hello(connection: Connection, credential: Credential, who: Self) -> say.Known:
    """Raises, if this side is not wanted, or if the other one is not the pool that it should be."""
    if connection.nonces is None:
        knock(connection)
    assert connection.nonces is not None
    nonces, binding = connection.nonces, connection.stream.binding
    connection.send(hello(credential, who, nonces, binding))
    known = expect(connection, say.Known)
    if not is_proven(known.proof, proof(credential.secret, "pool", credential.name, nonces, binding)):
        raise Refused("whoever answers there does not know the pool's secret: it is not the pool of this invite")
    return known


def error_of(stop: say.Stop) -> WideError:
    """Why the other end said goodbye, if not because all is done."""
    if stop.isa:
        return OtherSet(words.line(stop.why), stop.isa)
    kind = OtherProgram if stop.is_program else BY_EXIT_CODE.get(stop.exit_code, WideError)
    return kind(words.line(stop.why))


def expect(connection: Connection, kind: type[M]) -> M:
    message = connection.wait()
    if isinstance(message, say.Stop):
        raise error_of(message)
    if not isinstance(message, kind):
        raise ProtocolError("out of order", f"expected {kind.__name__}, got {type(message).__name__}")
    return message
