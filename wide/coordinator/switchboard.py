"""Everybody who is connected: one listener, one selector. Knows sockets and peers; decides nothing about training."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable

from wide.coordinator.bell import Bell
from wide.coordinator.peer import Peer
from wide.errors import ConnectionLost, Refused, WideError
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.tcp import Listener, TcpStream
from wide.wire import messages as say

TICK_S = 0.05
GOODBYE_S = 1.0
MOST_STRANGERS = 4096  # callers that have not said who they are; the oldest go first


class Switchboard:
    """`peers` by node, `strangers` who have not said hello. `hear` is called with a peer that can be read from, `lost`
    with one whose connection broke, `dismiss` with one that has to make room, `rung` after the bell was.
    """

    def __init__(
        self,
        listener: Listener,
        hear: Callable[[Peer], None],
        lost: Callable[[Peer, str], None],
        dismiss: Callable[[Peer, WideError], None],
        rung: Callable[[], None],
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.strangers: set[Peer] = set()
        self.idle_s = 0.0  # how long the loop has waited for something to do, all in all
        self.bell = Bell()
        self._listener = listener
        self._hear, self._lost, self._dismiss, self._rung = hear, lost, dismiss, rung
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self.bell, selectors.EVENT_READ, self._ring)

    @property
    def everybody(self) -> list[Peer]:
        return [*self.peers.values(), *self.strangers]

    @property
    def members(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.is_working]

    def wait(self) -> None:
        """Until something happens, but not for long; then serve whoever it happened to."""
        began = time.monotonic()
        ready = self._selector.select(TICK_S)
        self.idle_s += time.monotonic() - began
        for key, mask in ready:
            if isinstance(key.data, Peer):
                self._serve(key.data, mask)
            else:
                key.data()

    def send(self, peer: Peer, message: say.Message, *payload: bytes | memoryview) -> None:
        try:
            peer.connection.send(message, *payload)
        except ConnectionLost as error:
            self._lost(peer, str(error))
        else:
            self._watch_writing(peer)

    def say_goodbye(self, peer: Peer, why: str, code: int) -> None:
        try:
            peer.connection.send(say.Stop(why, code))
        except ConnectionLost:
            log.debug("%r was gone before goodbye", peer)

    def let_go(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection.stream)
        peer.connection.close()
        self.strangers.discard(peer)
        self.peers.pop(peer.node, None)

    def close(self, why: str, code: int) -> None:
        """Say goodbye to everybody, wait a moment until they have heard it, and let go of the sockets."""
        for peer in self.everybody:
            self.say_goodbye(peer, why, code)
        self._selector.unregister(self._listener)
        self._selector.unregister(self.bell)
        self._listener.close()
        self.bell.close()
        deadline, scratch = time.monotonic() + GOODBYE_S, memoryview(bytearray(1 << 16))
        while self._selector.get_map() and time.monotonic() < deadline:
            for key, _ in self._selector.select(TICK_S):
                try:
                    key.data.connection.flush()
                    key.data.connection.stream.receive_into(scratch)
                except ConnectionLost:
                    self._selector.unregister(key.fileobj)
        for peer in self.everybody:
            peer.connection.close()
        self._selector.close()

    def _serve(self, peer: Peer, mask: int) -> None:
        if peer.connection.stream.fileno() < 0:
            return  # forgotten a moment ago, while others were served
        if mask & selectors.EVENT_WRITE:
            try:
                peer.connection.flush()
            except ConnectionLost as error:
                self._lost(peer, str(error))
                return
            self._watch_writing(peer)
        if mask & selectors.EVENT_READ:
            self._hear(peer)

    def _ring(self) -> None:
        self.bell.hush()
        self._rung()

    def _accept(self) -> None:
        while (caller := self._next_caller()) is not None:
            if len(self.strangers) == MOST_STRANGERS:
                self._send_away_oldest()
            peer = Peer(Connection(caller[0]), caller[1], time.monotonic())
            self.strangers.add(peer)
            self._selector.register(peer.connection.stream, selectors.EVENT_READ, peer)

    def _next_caller(self) -> tuple[TcpStream, str] | None:
        """Who has not said hello yet makes room for the next one. If there is nobody such, callers wait outside."""
        while True:
            try:
                return self._listener.accept()
            except ConnectionLost:
                if not self.strangers:
                    time.sleep(TICK_S)  # or this loop would spin until somebody leaves
                    return None
                self._send_away_oldest()

    def _send_away_oldest(self) -> None:
        self._dismiss(min(self.strangers, key=lambda peer: peer.connected_at), Refused("too many callers at once"))

    def _watch_writing(self, peer: Peer) -> None:
        wants = peer.connection.has_unsent
        if wants != peer.wants_write:
            peer.wants_write = wants
            mask = selectors.EVENT_READ | selectors.EVENT_WRITE if wants else selectors.EVENT_READ
            self._selector.modify(peer.connection.stream, mask, peer)
