"""Streams over sockets: TCP, and sockets of this machine alone, over which a message takes half the time. Knows sockets
and their options, and translates OSError; knows nothing of frames or messages.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import math
import os
import secrets
import select
import socket
import ssl
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

from wide.config import Sockets
from wide.errors import ConnectionLost, ProtocolError, Unreachable, UsageError
from wide.transport.stream import Stream
from wide.transport.tls import FIRST_BYTE, Handshake

BACKLOG = 1024
IOV_MAX = 1024  # buffers in one vectored call: Linux, macOS and the BSDs take no more
PATIENCE = 4  # keepalive periods without an answer, or without room for what we send, until a peer counts as gone
SILENCE_S = 120.0  # a coordinator says every second that it is there, unless it is busy with a long step
DEFAULTS = Sockets()
HERE = "\0"  # an address that begins so is a name, known to this machine only: no file, and gone with its listener
CREDENTIALS = struct.Struct("3i")  # process, user, group


def address_here() -> str | None:
    """A new one; None, if this system has none."""
    return f"{HERE}wide-{secrets.token_hex(16)}" if sys.platform == "linux" else None


class TcpStream:
    """One connected socket. Blocking or not, `receive_into` and `send` say how much was done; 0 means: not now."""

    binding = b""  # it is not encrypted

    def __init__(self, sock: socket.socket, sockets: Sockets = DEFAULTS, silence_s: float | None = None) -> None:
        self._sock, self._silence_s = sock, silence_s
        self._sendmsg = getattr(sock, "sendmsg", lambda buffers: sock.send(buffers[0]))  # Windows has no sendmsg
        self._recv_into = sock.recv_into
        self._read_nbytes = sockets.read_nbytes or sys.maxsize
        self._quickack = getattr(socket, "TCP_QUICKACK", 0) if sockets.quickack else 0
        with contextlib.suppress(OSError):  # one of this machine has none; who is gone shows itself at the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, sockets.nodelay)
            _watch_peer(sock, sockets.keepalive_s)

    @property
    def is_closed(self) -> bool:
        return self._sock.fileno() < 0

    @property
    def is_own(self) -> bool:
        """Are both ends on this machine, as far as their addresses tell? A tunnel that ends here looks the same."""
        return self._sock.family == getattr(socket, "AF_UNIX", None) or is_own(self._sock)

    def fileno(self) -> int:
        return self._sock.fileno()

    def peek(self) -> bytes:
        """The first byte of what has come; nothing: not yet."""
        try:
            first = self._sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return b""
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None
        if not first:
            raise ConnectionLost("the peer closed the connection")
        return first

    def has_input(self) -> bool:
        return _is_ready(self._sock, reading=True, writing=False, timeout_s=0)

    def be_silent_for(self, silence_s: float | None) -> None:
        """So long may the peer say nothing, from now on; on a stream that blocks."""
        self._silence_s = silence_s
        self._sock.settimeout(silence_s)

    def set_blocking(self, is_blocking: bool) -> None:
        self._sock.settimeout(self._silence_s if is_blocking else 0)

    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None:
        """Until it can be read from, or written to; but not for ever."""
        if not _is_ready(self._sock, reading, writing, timeout_s or self._silence_s):
            raise ConnectionLost("the peer said nothing for too long")

    def receive_into(self, view: memoryview) -> int:
        try:
            nbytes = self._recv_into(view, self._read_nbytes if len(view) > self._read_nbytes else 0)
            if self._quickack:  # the kernel returns to delayed answers by itself, so this is said after each read
                self._sock.setsockopt(socket.IPPROTO_TCP, self._quickack, 1)
        except (BlockingIOError, InterruptedError):
            return 0
        except TimeoutError:
            raise ConnectionLost("the peer said nothing for too long") from None
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None
        if nbytes == 0:
            raise ConnectionLost("the peer closed the connection")
        return nbytes

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        """One vectored system call; the caller keeps what was not taken."""
        try:
            return self._sendmsg(buffers if len(buffers) <= IOV_MAX else buffers[:IOV_MAX])
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None

    def close(self) -> None:
        self._sock.close()


def is_own(sock: socket.socket) -> bool:
    """Nobody else has this machine's address, or one that begins with 127."""
    try:
        here, there = (ip(address[0]) for address in (sock.getsockname(), sock.getpeername()))
    except OSError:
        return False
    return here == there or (here.is_loopback and there.is_loopback)


def ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Of an IPv4 address that came in by an IPv6 socket, the former."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address


def _is_ready(sock: socket.socket, reading: bool, writing: bool, timeout_s: float | None) -> bool:
    """Can it be read from, or written to, within that time?"""
    if not hasattr(select, "poll"):  # Windows; elsewhere `select` knows no more than 1,024 files
        mine = (sock,)
        return any(select.select(mine if reading else (), mine if writing else (), (), timeout_s))
    poll = select.poll()
    poll.register(sock, (select.POLLIN if reading else 0) | (select.POLLOUT if writing else 0))
    return bool(poll.poll(None if timeout_s is None else math.ceil(1000 * timeout_s)))


def _watch_peer(sock: socket.socket, keepalive_s: int) -> None:
    """Have the kernel notice a peer that vanished, whether we wait for it or send to it."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, keepalive_s > 0)
    values = {
        "TCP_KEEPIDLE": keepalive_s,
        "TCP_KEEPALIVE": keepalive_s,  # macOS calls it so
        "TCP_KEEPINTVL": keepalive_s,
        "TCP_KEEPCNT": PATIENCE - 1,
        "TCP_USER_TIMEOUT": PATIENCE * keepalive_s * 1000,
    }
    for option, value in values.items():
        if keepalive_s and hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _size_buffers(sock: socket.socket, sockets: Sockets) -> None:
    """Before the handshake, which fixes how far the window can open; accepted sockets inherit it."""
    if sockets.buffer_nbytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sockets.buffer_nbytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, sockets.buffer_nbytes)


def connect(
    host: str, port: int, sockets: Sockets = DEFAULTS, timeout_s: float = 10.0, silence_s: float | None = None
) -> TcpStream:
    """A blocking stream to a coordinator, which may be silent for so long. Raises Unreachable."""
    try:
        sock = _dial(host, port, sockets, timeout_s)
    except (OSError, UnicodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise Unreachable(
            f"no coordinator answers at {shown(host, port)} ({why}): is `wide serve` running there, "
            "and may this machine reach it?"
        ) from None
    sock.settimeout(silence_s)
    return TcpStream(sock, DEFAULTS if host.startswith(HERE) else sockets, silence_s)


def shown(host: str, port: int) -> str:
    """An address as people write it."""
    return "this machine" if host.startswith(HERE) else f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _dial(host: str, port: int, sockets: Sockets, timeout_s: float) -> socket.socket:
    """socket.create_connection, with the buffers sized before it connects."""
    if host.startswith(HERE):
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(host)
        return sock
    problem = OSError("the name has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            _size_buffers(sock, sockets)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise problem


class Tls(NamedTuple):
    """What a pool encrypts with, and its certificate's hash."""

    context: ssl.SSLContext
    binding: bytes


class Call:
    """Somebody who dialled in, until it is known how it speaks. `host` is where from, `address` the same with its port;
    `stream` is the connection as it is, for a last word.
    """

    def __init__(self, stream: TcpStream, host: str, address: str, tls: Tls | None, allows_plain: bool) -> None:
        self.stream, self.host, self.address = stream, host, address
        self.is_own = stream.is_own
        self._tls, self._allows_plain = tls, allows_plain or self.is_own
        self._handshake: Handshake | None = None

    def fileno(self) -> int:
        return self.stream.fileno()

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
        if not self._allows_plain:
            raise ProtocolError("not encrypted", "this pool encrypts what comes from other machines: use its invite")
        return self.stream

    def close(self) -> None:
        self.stream.close()


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
        sock.setblocking(False)
        stream = TcpStream(sock, self._sockets)
        if self._is_here:
            return Call(stream, "localhost", "localhost", None, True)
        host = str(ip(address[0]))
        return Call(stream, host, shown(host, address[1]), self._tls, self._is_insecure)

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
    _size_buffers(sock, sockets)
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
