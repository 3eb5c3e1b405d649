"""Streams over sockets: TCP, and sockets of this machine alone, over which a message takes half the time. Knows sockets
and their options, and translates OSError; knows nothing of frames or messages.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import secrets
import select
import socket
import sys
from collections.abc import Sequence

from wide.config import Sockets
from wide.errors import ConnectionLost, Unreachable

IOV_MAX = 1024  # buffers in one vectored call: Linux, macOS and the BSDs take no more
PATIENCE = 4  # keepalive periods without an answer, or without room for what we send, until a peer counts as gone
SILENCE_S = 120.0  # a coordinator says every second that it is there, unless it is busy with a long step
DEFAULTS = Sockets()
HERE = "\0"  # an address that begins so is a name, known to this machine only: no file, and gone with its listener


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


def size_buffers(sock: socket.socket, sockets: Sockets) -> None:
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
            size_buffers(sock, sockets)
            sock.settimeout(timeout_s)
            sock.connect(address)
        except OSError as error:
            sock.close()
            problem = error
        else:
            return sock
    raise problem
