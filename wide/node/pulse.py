"""A node's heartbeat: while it computes, somebody must say that it is still there. Knows a connection and a thread."""

from __future__ import annotations

import threading
from typing import Self

from wide.errors import ConnectionLost
from wide.transport.connection import Connection
from wide.wire.messages import BEAT_S, Alive


class Pulse:
    """Beats once a second if nothing else was said meanwhile. What the network would not take before, it sends too."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()

    def _beat(self) -> None:
        said = self._connection.bytes_sent
        while not self._is_over.wait(BEAT_S):
            try:
                self._connection.flush()
                if self._connection.bytes_sent == said and not self._connection.has_unsent:
                    self._connection.send(Alive())
            except ConnectionLost:
                return  # whoever waits for an answer will notice
            said = self._connection.bytes_sent
