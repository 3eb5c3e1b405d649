"""How whoever dials introduces itself, for tests that speak for themselves."""

from __future__ import annotations

from wide.transport.introduction import Self, expect, hello
from wide.wire import messages as say
from wide.wire.proof import Credential, of_token, proof

NONCES = (bytes(16), bytes(16))
KNOCK = say.Knock(say.PROTOCOL, NONCES[0])


def a_hello(
    token="token", role="node", name="atlas", host="elsewhere", pid=1, build="build", key="", nonces=NONCES, **more
):
    """As somebody says it who knows that token; `credential` names another secret than "token"."""
    kind = more.pop("credential", "evaluator" if role == "evaluator" else "token")
    credential = Credential(kind, token) if isinstance(token, bytes) else of_token(token, kind)
    return hello(credential, Self(role, name, host, pid, build, key, **more), nonces)


def introduced(connection, turn=lambda: None, **changes):
    """Knock, and say hello; the coordinator has its `turn` in between. What it answers, if not with Known."""
    connection.send(KNOCK)
    turn()
    challenge = expect(connection, say.Challenge)
    connection.send(a_hello(**{"nonces": (NONCES[0], challenge.nonce)} | changes))
    turn()
    return connection


def believed(coordinator, token="token"):
    """What a coordinator answers to somebody who knows that token, and whose nonces are NONCES."""
    coordinator.send(say.Challenge(say.PROTOCOL, NONCES[1]))
    coordinator.send(say.Known(proof(token.encode(), "pool", "token", NONCES, b"")))
