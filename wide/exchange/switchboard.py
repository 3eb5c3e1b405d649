"""Everybody who is connected: strangers who have not said hello, and peers by their number. Knows a hub and
connections; decides nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wide.errors import ConnectionLost
from wide.exchange.peer import Peer
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.hub import Hub
from wide.wire import messages as say

TICK_S = 0.05
GOODBYE_S = 1.0
MOST_STRANGERS = 4096  # callers that have not said who they are; the oldest go first


class Switchboard:
    """`lost` is told of a peer whose connection broke while something was sent to it; it must only take note."""

    def __init__(self, hub: Hub, lost: Callable[[Peer, str], None], now: Callable[[], float]) -> None:
        self.peers: dict[int, Peer] = {}
        self.strangers: dict[Peer, None] = {}  # in the order of their calls
        self.hub, self._lost, self._now = hub, lost, now

    @property
    def everybody(self) -> list[Peer]:
        return [*self.peers.values(), *self.strangers]

    @property
    def members(self) -> Iterator[Peer]:
        """Nodes that can be given work."""
        return (peer for peer in self.peers.values() if peer.is_ready and not peer.is_evaluator)

    def send(self, peer: Peer, message: say.Message, *payload: bytes | memoryview) -> None:
        try:
            peer.connection.send(message, *payload)
        except ConnectionLost as error:
            self._lost(peer, str(error))
        else:
            if peer.connection.has_unsent != peer.wants_write:
                self._watch_writing(peer)

    def flush(self, peer: Peer) -> None:
        """There is room again for what it is sent."""
        try:
            peer.connection.flush()
        except ConnectionLost as error:
            self._lost(peer, str(error))
        else:
            self._watch_writing(peer)

    def say_goodbye(self, peer: Peer, why: str, code: int) -> None:
        try:
            peer.connection.send(say.Stop(why, code))
        except ConnectionLost:
            log.debug("%r was gone before goodbye", peer)

    def accept(self, oldest_has_to_go: Callable[[Peer], None]) -> None:
        """All who call now. Who has not said hello yet makes room for the next one; if there is nobody such, callers
        wait outside.
        """
        for _ in range(MOST_STRANGERS):
            try:
                caller = self.hub.accept()
            except ConnectionLost:
                if not self.strangers:
                    self.hub.listen(False)  # until the next tick, or this loop would spin until somebody leaves
                    return
                oldest_has_to_go(next(iter(self.strangers)))
                continue
            if caller is None:
                return
            if len(self.strangers) >= MOST_STRANGERS:
                oldest_has_to_go(next(iter(self.strangers)))
            peer = Peer(Connection(caller[0]), caller[1], self._now())
            self.strangers[peer] = None
            self.hub.register(caller[0], peer)

    def seat(self, peer: Peer) -> None:
        """It has said who it is."""
        self.strangers.pop(peer, None)
        self.peers[peer.node] = peer

    def let_go(self, peer: Peer) -> None:
        self.hub.unregister(peer.connection.stream)
        peer.connection.close()
        self.strangers.pop(peer, None)
        if self.peers.get(peer.node) is peer:
            del self.peers[peer.node]

    def close(self, why: str, code: int, comes_back: bool = False) -> None:
        """Say goodbye to everybody, wait a moment until they have heard it, and let go of the sockets."""
        for peer in self.everybody:
            self.say_goodbye(peer, why, code)
        self.hub.listen(False)
        if not comes_back:
            self.hub.stop_listening()
        deadline, scratch = self._now() + GOODBYE_S, memoryview(bytearray(1 << 16))
        waiting = set(self.everybody)
        while waiting and self._now() < deadline:
            for peer, _, _ in self.hub.wait(TICK_S):
                if peer not in waiting:
                    continue
                try:
                    peer.connection.flush()
                    peer.connection.stream.receive_into(scratch)
                except ConnectionLost:
                    waiting.discard(peer)
                    self.hub.unregister(peer.connection.stream)
        for peer in self.everybody:
            peer.connection.close()
        self.hub.close()

    def _watch_writing(self, peer: Peer) -> None:
        wants = peer.connection.has_unsent
        if wants != peer.wants_write:
            peer.wants_write = wants
            self.hub.watch_writing(peer.connection.stream, peer, wants)
