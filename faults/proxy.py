"""A small TCP proxy whose links can be cut, reset and slowed. Knows bytes and sockets; knows nothing of what they mean.

One listening port per link, all of which lead to one target. A cut link is a pulled cable: nothing is read, nothing
is forwarded, not even that an end has closed, and callers wait in the kernel's queue; healed, it goes on where it was,
without a byte lost. A reset link's connections end at once, with RST on both sides, and new ones may follow.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Self

CHUNK_NBYTES = 64 << 10
MOST_HELD_NBYTES = 512 << 10  # of one direction; then its sender has to wait
TICK_S = 0.5
LINGER_NOT = struct.pack("ii", 1, 0)  # close() sends RST
DIAL_S = 5.0


@dataclass(frozen=True)
class Condition:
    """How a link is. Zero bytes/s: as fast as it goes."""

    is_cut: bool = False
    bytes_per_s: float = 0.0
    delay_s: float = 0.0


HEALTHY, CUT = Condition(), Condition(is_cut=True)


@dataclass(eq=False)
class _Flow:
    """One direction of a connection: bytes that were read from `source`, and when they may go on to `sink`."""

    source: socket.socket
    sink: socket.socket
    held: deque[tuple[float, memoryview]] = field(default_factory=deque)
    held_nbytes: int = 0
    free_at: float = 0.0  # when the last byte has left a slow link
    has_ended: bool = False

    def take(self, condition: Condition, now: float) -> None:
        data = self.source.recv(CHUNK_NBYTES)
        self.has_ended = not data
        if data:
            self.free_at = max(self.free_at, now) + (len(data) / condition.bytes_per_s if condition.bytes_per_s else 0)
            self.held.append((self.free_at + condition.delay_s, memoryview(data)))
            self.held_nbytes += len(data)

    def pass_on(self, now: float) -> None:
        while self.held and self.held[0][0] <= now:
            due, data = self.held[0]
            sent = self.sink.send(data)
            self.held_nbytes -= sent
            if sent < len(data):
                self.held[0] = (due, data[sent:])
                return
            self.held.popleft()


@dataclass(eq=False)
class _Pair:
    """A caller, the target, and what flows between them."""

    link: int
    flows: tuple[_Flow, _Flow]

    @property
    def ends(self) -> tuple[socket.socket, socket.socket]:
        return self.flows[0].source, self.flows[0].sink


class Proxy:
    """`ports[i]` is where link i begins. `set` and `reset` may be called from any thread and take effect at once."""

    def __init__(self, links: int, target: tuple[str, int]) -> None:
        self._target = target
        self._listeners = [socket.create_server(("127.0.0.1", 0), backlog=64) for _ in range(links)]
        self.ports: list[int] = [listener.getsockname()[1] for listener in self._listeners]
        self._conditions = [HEALTHY] * links
        self._pairs: set[_Pair] = set()
        self._selector = selectors.DefaultSelector()
        self._orders: SimpleQueue[tuple[int, Condition | None] | None] = SimpleQueue()
        self._bell, self._rope = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ)
        for link, listener in enumerate(self._listeners):
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, link)
        self._thread = threading.Thread(target=self._work, name="proxy", daemon=True)
        self._thread.start()

    def set(self, link: int, condition: Condition) -> None:
        self._order((link, condition))

    def reset(self, link: int) -> None:
        self._order((link, None))

    def close(self) -> None:
        self._order(None)
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _order(self, order: tuple[int, Condition | None] | None) -> None:
        self._orders.put(order)
        self._rope.send(b"!")

    # ── its thread ───────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        while True:
            ready = self._selector.select(self._until_due())
            if any(key.fileobj is self._bell for key, _ in ready):
                self._bell.recv(1)
                if (order := self._orders.get()) is None:
                    break
                self._obey(*order)
                continue  # what was ready may be gone
            for key, events in ready:
                if isinstance(key.data, int):
                    self._accept(key.data)
                elif key.data in self._pairs and events & selectors.EVENT_READ:
                    self._move(key.data, key.fileobj)
            for pair in list(self._pairs):
                self._move(pair)
        for pair in list(self._pairs):
            self._drop(pair)
        for sock in (*self._listeners, self._bell, self._rope):
            sock.close()
        self._selector.close()

    def _obey(self, link: int, condition: Condition | None) -> None:
        mine = [pair for pair in self._pairs if pair.link == link]
        if condition is None:
            for pair in mine:
                self._drop(pair)
            return
        self._conditions[link] = condition
        self._watch(self._listeners[link], 0 if condition.is_cut else selectors.EVENT_READ, link)
        for pair in mine:
            self._watch_pair(pair)

    def _accept(self, link: int) -> None:
        try:
            caller, _ = self._listeners[link].accept()
        except OSError:
            return
        try:
            callee = socket.create_connection(self._target, DIAL_S)
        except OSError:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
            caller.close()  # as near to "connection refused" as one gets after accept()
            return
        for sock in (caller, callee):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        pair = _Pair(link, (_Flow(caller, callee), _Flow(callee, caller)))
        self._pairs.add(pair)
        self._watch_pair(pair)

    def _move(self, pair: _Pair, readable: object = None) -> None:
        condition, now = self._conditions[pair.link], time.monotonic()
        if condition.is_cut:
            return
        try:
            for flow in pair.flows:
                if flow.source is readable and flow.held_nbytes < MOST_HELD_NBYTES and not flow.has_ended:
                    flow.take(condition, now)
                with contextlib.suppress(BlockingIOError):
                    flow.pass_on(now)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(pair)
            return
        if any(flow.has_ended and not flow.held for flow in pair.flows):
            self._drop(pair, is_reset=False)  # nobody here speaks on after the other end has closed
        else:
            self._watch_pair(pair)

    def _drop(self, pair: _Pair, is_reset: bool = True) -> None:
        self._pairs.discard(pair)
        for sock in pair.ends:
            self._watch(sock, 0, pair)
            with contextlib.suppress(OSError):
                if is_reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER_NOT)
            sock.close()

    # ── what to wait for ─────────────────────────────────────────────────────────────────────────────────────────

    def _watch_pair(self, pair: _Pair) -> None:
        is_cut, now = self._conditions[pair.link].is_cut, time.monotonic()
        forth, back = pair.flows
        for flow, other in ((forth, back), (back, forth)):
            reads = flow.held_nbytes < MOST_HELD_NBYTES and not flow.has_ended
            writes = bool(other.held) and other.held[0][0] <= now
            events = (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0)
            self._watch(flow.source, 0 if is_cut else events, pair)

    def _watch(self, sock: socket.socket, events: int, data: object) -> None:
        if sock not in self._selector.get_map():
            if events:
                self._selector.register(sock, events, data)
        elif not events:
            self._selector.unregister(sock)
        else:
            self._selector.modify(sock, events, data)

    def _until_due(self) -> float:
        """Seconds until held bytes may go on; those that only wait for room in a socket are the selector's."""
        now = time.monotonic()
        later = [
            flow.held[0][0] - now
            for pair in self._pairs
            if not self._conditions[pair.link].is_cut
            for flow in pair.flows
            if flow.held and flow.held[0][0] > now
        ]
        return min(TICK_S, *later) if later else TICK_S
