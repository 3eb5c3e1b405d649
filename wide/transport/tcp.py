"""TCP streams. Knows sockets and their options, and translates OSError; knows nothing of frames or messages."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Sequence

from wide.errors import ConnectionLost, Unreachable, UsageError

BACKLOG = 1024
KEEPALIVE_S = 15


class TcpStream:
    """One connected socket. Blocking or not, `receive_into` and `send` say how much was done; 0 means: not now."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        with contextlib.suppress(OSError):  # a peer that is already gone shows itself at the first read
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option in ("TCP_KEEPIDLE", "TCP_KEEPINTVL"):
                if hasattr(socket, option):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), KEEPALIVE_S)

    def fileno(self) -> int:
        return self._sock.fileno()

    def has_input(self) -> bool:
        return bool(select.select((self._sock,), (), (), 0)[0])

    def receive_into(self, view: memoryview) -> int:
        try:
            nbytes = self._sock.recv_into(view)
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
            if hasattr(self._sock, "sendmsg"):
                return self._sock.sendmsg(buffers)
            return self._sock.send(buffers[0])  # Windows has no sendmsg
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise ConnectionLost(f"the connection broke: {error.strerror or error}") from None

    def close(self) -> None:
        self._sock.close()


def connect(host: str, port: int, timeout_s: float = 10.0) -> TcpStream:
    """A blocking stream to a coordinator."""
    try:
        sock = socket.create_connection((host, port), timeout=timeout_s)
    except OSError as error:
        raise Unreachable(
            f"no coordinator answers at {host}:{port} ({error.strerror or error}): is `wide serve` running there, "
            "and may this machine reach it?"
        ) from None
    sock.settimeout(None)
    return TcpStream(sock)


class Listener:
    """A listening socket that hands out non-blocking streams."""

    def __init__(self, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._sock = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except OSError as error:
            raise UsageError(
                f"cannot listen on {host} port {port} ({error.strerror or error}): choose another with --port"
            ) from None
        self._sock.setblocking(False)
        _allow_many_files()
        self.host, self.port = self._sock.getsockname()[:2]

    def fileno(self) -> int:
        return self._sock.fileno()

    def accept(self) -> tuple[TcpStream, str] | None:
        """The next caller and its address, or None when there is none (any more).

        Raises ConnectionLost when there is one but no room for it: somebody else must go first.
        """
        try:
            sock, address = self._sock.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise ConnectionLost("too many connections are open") from None
            return None
        sock.setblocking(False)
        return TcpStream(sock), f"{address[0]}:{address[1]}"

    def close(self) -> None:
        """Callers that were never accepted are sent away too, even if forked children still hold this socket."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def _allow_many_files() -> None:
    """A pool may have more members than the 1,024 files that many systems allow by default."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limit
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
