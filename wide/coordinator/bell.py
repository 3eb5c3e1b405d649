"""A bell that other threads ring to wake the coordinator's loop. Knows a pair of sockets and nothing else."""

from __future__ import annotations

import contextlib
import socket


class Bell:
    """Register it with a selector; `ring` from anywhere, `hush` once it was heard."""

    def __init__(self) -> None:
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)

    def fileno(self) -> int:
        return self._heard.fileno()

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it is ringing already, or nobody is left to hear it
            self._rung.send(b"!")

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._heard.recv(4096)

    def close(self) -> None:
        self._heard.close()
        self._rung.close()
