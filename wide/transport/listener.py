"""Who is called: listening sockets, and callers until it is known how they speak. Knows sockets and TLS."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import ssl
import struct
from typing import NamedTuple

from wide.config import Sockets
from wide.errors import ConnectionLost, ProtocolError, UsageError
from wide.transport.stream import Stream
from wide.transport.tcp import DEFAULTS, HERE, TcpStream, ip, shown, size_buffers
from wide.transport.tls import FIRST_BYTE, Handshake

BACKLOG = 1024
CREDENTIALS = struct.Struct("3i")  # process, user, group


class Tls(NamedTuple):
    """What a pool encrypts with, and its certificate's hash."""

    context: ssl.SSLContext
    binding: bytes


class Call:
    """Somebody who dialled in, until it is known how it speaks. `host` is where from, `address` the same with its port;
    `stream` is the connection as it is, for a last word. Who is sent away at once costs nothing more.
    """

    def __init__(
        self, sock: socket.socket, sockets: Sockets, host: str, address: str, tls: Tls | None, allows_plain: bool
    ) -> None:
        self._sock, self._sockets, self.host, self.address = sock, sockets, host, address
        self._tls, self._allows_plain = tls, allows_plain
        self._handshake: Handshake | None = None

    @functools.cached_property
    def stream(self) -> TcpStream:
        self._sock.setblocking(False)
        return TcpStream(self._sock, self._sockets)

    @functools.cached_property
    def is_own(self) -> bool:
        return self.stream.is_own

    def answer(self) -> Stream | None:
        """What can be spoken over; None: it has not said enough yet. Raises ConnectionLost or ProtocolError."""
        if self._handshake is not None:
            return self._handshake.advance()
        if self._tls is None and self._allows_plain:
            return self.stream
        if not (first := self.stream.peek()):
            return None
        if first[0] == FIRST_BYTE and self._tls is not None:
            self._handshake = Handshake(self.stream, self._tls.context, True, self._tls.binding)
            return self._handshake.advance()
        if not (self._allows_plain or self.is_own):
            raise ProtocolError("not encrypted", "this pool encrypts what comes from other machines: use its invite")
        return self.stream

    def close(self) -> None:
        self._sock.close()


class Listener:
    """A listening socket that hands out callers, none of whom blocks. With `tls`, others than this machine's own are
    answered only if they encrypt what they say; unless `is_insecure`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        sockets: Sockets = DEFAULTS,
        tls: Tls | None = None,
        is_insecure: bool = False,
    ) -> None:
        self._is_here = host.startswith(HERE)
        self._sockets = DEFAULTS if self._is_here else sockets
        self._tls, self._is_insecure = tls, is_insecure
        try:
            self._sock = _listen_here(host) if self._is_here else _listen(host, port, sockets)
        except OSError as error:
            why, option = str(error.strerror or error).partition(" (while")[0], "--port"
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                option = "--host (0.0.0.0: all of this machine's)"
            raise UsageError(f"cannot listen on {host} port {port} ({why}): choose another with {option}") from None
        self._sock.setblocking(False)
        _allow_many_files()
        self.host: str = host
        self.port: int = 0
        if not self._is_here:
            self.host, self.port = self._sock.getsockname()[:2]

    def encrypt(self, tls: Tls) -> None:
        """From now on, and with this."""
        self._tls = tls

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> Call | None:
        """The next caller, or None when there is none (any more).

        Raises ConnectionLost when there is one but no room for it: somebody else must go first.
        """
        try:
            sock, address = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConnectionLost("too many connections are open") from None
            return None
        if self._is_here and not _is_own_user(sock):
            sock.close()
            return None
        if self._is_here:
            return Call(sock, self._sockets, "localhost", "localhost", None, True)
        host = str(ip(address[0]))
        return Call(sock, self._sockets, host, shown(host, address[1]), self._tls, self._is_insecure)

    def close(self) -> None:
        """Callers that were never accepted are sent away too, even if forked children still hold this socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _listen(host: str, port: int, sockets: Sockets) -> socket.socket:
    """All addresses of IPv6 include those of IPv4, where the system can do that."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    sock = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    size_buffers(sock, sockets)
    return sock


def _listen_here(name: str) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(name)
    sock.listen(BACKLOG)
    return sock


def _is_own_user(sock: socket.socket) -> bool:
    """The name is no secret: everybody on this machine can see it."""
    user: int = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    return user == os.getuid()


def _allow_many_files() -> None:
    """A pool may have more members than the 1,024 files that many systems allow by default."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
