"""How to reach a pool, and with what secret: one struct for everybody who dials. Knows addresses and TCP."""

from __future__ import annotations

import msgspec

from wide.config import Sockets
from wide.errors import UsageError
from wide.transport.connection import Connection
from wide.transport.tcp import connect


class Endpoint(msgspec.Struct, frozen=True):
    """A pool's address and its token."""

    host: str
    port: int
    token: str
    sockets: Sockets = Sockets()

    def dial(self, silence_s: float | None = None) -> Connection:
        """A connection that blocks; the coordinator may be silent for so long."""
        return Connection(connect(self.host, self.port, self.sockets, silence_s=silence_s))


def endpoint(address: str, token: str, sockets: Sockets) -> Endpoint:
    """From HOST:PORT, as `wide serve` printed it."""
    host, _, port = address.rpartition(":")
    if not host or not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise UsageError(f"{address}: expected HOST:PORT, as `wide serve` printed it")
    if not token:
        raise UsageError("no token: set WIDE_TOKEN or give --token-file, with the token of `wide serve`")
    return Endpoint(host.strip("[]"), int(port), token, sockets)
