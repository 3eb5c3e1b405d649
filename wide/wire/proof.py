"""Who knows a secret shows that it does, and never says it. Knows hashes; knows nobody's name and no clock.

Both ends contribute a nonce, and both know the connection's `binding`: the hash of the certificate it is encrypted
with, or nothing on a connection of this machine. So what one end proved is of no use on any other connection.

A pool has one root secret. The secrets of invites, machines, viewers and admins follow from it, each by its own name:
none of them has to be kept, and none tells anything about another.
"""

from __future__ import annotations

import hmac
import secrets
from typing import Literal

import msgspec

NONCE_NBYTES = 16
SECRET_NBYTES = 16
ROOT_NBYTES = 32

Kind = Literal["invite", "machine", "viewer", "admin"]
Side = Literal["node", "pool"]


class Credential(msgspec.Struct, frozen=True):
    """A secret, and the name by which both ends know it: "token", "evaluator", "invite ID" or "machine ID"."""

    name: str
    secret: bytes

    def __repr__(self) -> str:
        return f"<Credential {self.name}>"  # never the secret


def of_token(token: str, name: str = "token") -> Credential:
    return Credential(name, token.encode())


def nonce() -> bytes:
    return secrets.token_bytes(NONCE_NBYTES)


def derived(root: bytes, kind: Kind, name: str = "") -> bytes:
    """The secret of one invite, or machine, of the pool with this root."""
    return hmac.digest(root, f"wide {kind} {name}".encode(), "sha256")[:SECRET_NBYTES]


def proof(secret: bytes, side: Side, credential: str, nonces: tuple[bytes, bytes], binding: bytes) -> bytes:
    """What only somebody with the secret can say, in this conversation. `nonces`: the node's, the pool's."""
    said = b"".join(len(part).to_bytes(2, "big") + part for part in (credential.encode(), *nonces, binding))
    return hmac.digest(secret, f"wide {side} ".encode() + said, "sha256")


def is_proven(claimed: bytes, expected: bytes) -> bool:
    """Compared in a time that tells nothing about where they differ."""
    return hmac.compare_digest(claimed, expected)
