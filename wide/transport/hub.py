"""Everybody who is connected to one process: who has something to read, who has room to write, who calls. Knows streams
and keys, no messages. TCP's is here; memory.py has the in-memory twin.
"""

from __future__ import annotations

import contextlib
import functools
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

from wide.transport.listener import Call, Listener
from wide.transport.stream import Stream
from wide.transport.tls import TlsStream

CALLERS, RUNG = "callers", "rung"  # keys: somebody wants to be accepted; somebody has rung


class Ready(NamedTuple):
    """What was registered as `key` can be read from, or written to."""

    key: Any
    reads: bool
    writes: bool


class Caller(Protocol):
    """Somebody who wants to be connected (tcp.Call). `is_own`: both ends are on this machine."""

    host: str
    address: str

    @property
    def is_own(self) -> bool: ...
    @property
    def stream(self) -> Stream: ...  # as it came, for a last word
    def answer(self) -> Stream | None: ...  # None: it has not said enough yet
    def close(self) -> None: ...


class Hub(Protocol):
    """What an exchange needs of a network. `idle_s`: how long it has waited for something to do, all in all."""

    idle_s: float

    def wait(self, timeout_s: float) -> Iterable[Ready]: ...
    def accept(self) -> Caller | None: ...  # ConnectionLost: there is somebody, but no room for it
    def register(self, stream: Any, key: object) -> None: ...
    def watch_writing(self, stream: Any, key: object, is_wanted: bool) -> None: ...
    def unregister(self, stream: Any) -> None: ...
    def ring(self) -> None: ...  # from any thread: `wait` returns, with RUNG
    def listen(self, is_wanted: bool) -> None: ...  # are callers told of?
    def stop_listening(self) -> None: ...
    def close(self) -> None: ...


class TcpHub:
    """Listeners, one selector, and a bell that other threads ring to wake the loop."""

    def __init__(self, *listeners: Listener) -> None:
        self.idle_s = 0.0
        self._listeners = listeners
        self._heard, self._rung = socket.socketpair()
        self._heard.setblocking(False)
        self._rung.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._unread: dict[int, Any] = {}  # keys of streams that hold more than they were asked for, by their files
        self._is_listening = False
        self.listen(True)
        self._selector.register(self._heard, selectors.EVENT_READ, RUNG)

    def wait(self, timeout_s: float) -> list[Ready]:
        began = time.monotonic()
        unread, self._unread = self._unread, {}
        found = self._selector.select(0.0 if unread else timeout_s)
        self.idle_s += time.monotonic() - began
        ready = [Ready(key, True, False) for key in unread.values()]
        for key, mask in found:
            if key.data is RUNG:
                with contextlib.suppress(BlockingIOError):
                    self._heard.recv(4096)
            ready.append(Ready(key.data, bool(mask & selectors.EVENT_READ), bool(mask & selectors.EVENT_WRITE)))
        return ready

    def accept(self) -> Call | None:
        callers = (caller for listener in self._listeners if (caller := listener.accept()) is not None)
        return next(callers, None)

    def register(self, stream: Any, key: object) -> None:
        self._selector.register(stream, selectors.EVENT_READ, key)
        if isinstance(stream, TlsStream):  # the system knows nothing of what is here, but not read
            stream.on_rest = functools.partial(self._holds_more, stream.fileno(), key)
            stream.on_rest()

    def _holds_more(self, file: int, key: object) -> None:
        self._unread[file] = key

    def watch_writing(self, stream: Any, key: object, is_wanted: bool) -> None:
        mask = selectors.EVENT_READ | selectors.EVENT_WRITE if is_wanted else selectors.EVENT_READ
        self._selector.modify(stream, mask, key)

    def unregister(self, stream: Any) -> None:
        self._selector.unregister(stream)
        self._unread.pop(stream.fileno(), None)

    def ring(self) -> None:
        with contextlib.suppress(OSError):  # it is ringing already, or nobody is left to hear it
            self._rung.send(b"!")

    def listen(self, is_wanted: bool) -> None:
        if is_wanted != self._is_listening:
            self._is_listening = is_wanted
            for listener in self._listeners:
                if is_wanted:
                    self._selector.register(listener, selectors.EVENT_READ, CALLERS)
                else:
                    self._selector.unregister(listener)

    def stop_listening(self) -> None:
        self.listen(False)
        for listener in self._listeners:
            listener.close()

    def close(self) -> None:
        self._selector.close()
        self._heard.close()
        self._rung.close()
