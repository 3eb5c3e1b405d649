"""Everybody who is connected: callers who have not said a word that makes sense, strangers who have not said who they
are, visitors who only ask, and peers by their number. Knows a hub and connections; decides nothing about training.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wide.errors import ConnectionLost, ProtocolError, Refused, WideError
from wide.exchange.gate import Gate, neighbourhood
from wide.exchange.patience import GREETING_S, VISIT_S
from wide.exchange.peer import Peer
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.hub import Caller, Hub
from wide.wire import messages as say

TICK_S = 0.05
GOODBYE_S = 1.0
MOST_AT_ONCE = 32  # callers that are answered in one turn: whoever trains comes before them
MOST_STRANGERS, MOST_OF_HOST = 1024, 256  # in all, and from one address; the oldest go first
MOST_VISITORS = 64

Complain = Callable[[str, str, WideError], None]  # host, address, why


class Switchboard:
    """`lost` is told of a peer whose connection broke while something was sent to it; it must only take note.
    `complain` is told of callers that were sent away.
    """

    def __init__(
        self, hub: Hub, lost: Callable[[Peer, str], None], complain: Complain, now: Callable[[], float]
    ) -> None:
        self.peers: dict[int, Peer] = {}
        self.visitors: dict[Peer, None] = {}
        self.hub, self._lost, self._complain, self._now = hub, lost, complain, now
        self._gate = Gate(now())
        self._strangers: dict[Caller | Peer, float] = {}  # since when; callers, too, in the order of their calls
        self._of_host: dict[str, dict[Caller | Peer, None]] = {}

    @property
    def everybody(self) -> list[Peer]:
        """All who have a connection."""
        strangers = (peer for peer in self._strangers if isinstance(peer, Peer))
        return [*self.peers.values(), *self.visitors, *strangers]

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

    def say_goodbye(self, peer: Peer, why: str, code: int, is_program: bool = False, isa: str = "") -> None:
        try:
            peer.connection.send(say.Stop(why, code, is_program, isa))
        except ConnectionLost:
            log.debug("%r was gone before goodbye", peer)

    # ── callers ──────────────────────────────────────────────────────────────────────────────────────────────────

    def accept(self) -> None:
        """Some of those who call now. Who has not said hello yet makes room for the next one; if there is nobody such,
        or if too many call, they wait outside until the next tick.
        """
        for _ in range(MOST_AT_ONCE):
            if not self._gate.is_open(self._now()):
                self.hub.listen(False)
                return
            try:
                call = self.hub.accept()
            except ConnectionLost:
                if not self._strangers:
                    self.hub.listen(False)  # or this loop would spin until somebody leaves
                    return
                self._send_away(next(iter(self._strangers)))
                continue
            if call is None:
                return
            self._greet(call)

    def _greet(self, call: Caller) -> None:
        if call.host and call.host != "localhost" and not self._gate.may_come(call.host, self._now()):
            call.close()
            self._complain(call.host, call.address, Refused("too many calls from one address"))
            return
        self._take_in(call)
        self.hub.register(call.stream, call)
        self.answer(call)

    def answer(self, call: Caller) -> None:
        """It has said something; perhaps enough to know how it speaks."""
        if call not in self._strangers:
            return
        try:
            stream = call.answer()
        except ConnectionLost:
            self._drop(call)
        except ProtocolError as error:
            self._complain(call.host, call.address, error)
            self._tell(call, error)
            self._drop(call)
        else:
            if stream is not None:
                self._forget(call)
                peer = Peer(Connection(stream), call.address, self._now(), call.host, call.is_own)
                self._take_in(peer)
                self.hub.register(stream, peer)

    def _tell(self, call: Caller, error: WideError) -> None:
        """In plain words, since it speaks no others."""
        try:
            Connection(call.stream).send(say.Stop(str(error), Refused.exit_code))
        except ConnectionLost:
            log.debug("%s was gone before it was told", call.address)

    def late(self, now: float) -> list[Peer]:
        """Strangers and visitors that have taken too long; callers that have are gone."""
        found = []
        for caller, since in list(self._strangers.items()):
            if now - since <= GREETING_S:
                break
            if isinstance(caller, Peer):
                found.append(caller)
            else:
                self._complain(caller.host, caller.address, Refused("it did not say hello in time"))
                self._drop(caller)
        return found + [peer for peer in self.visitors if now - peer.connected_at > VISIT_S]

    def _take_in(self, caller: Caller | Peer) -> None:
        """There is room for so many; the oldest goes first, and from the same address if that has too many."""
        host = neighbourhood(caller.host)
        mine = self._of_host.get(host, {})
        if len(mine) >= MOST_OF_HOST:
            self._send_away(next(iter(mine)))
        elif len(self._strangers) >= MOST_STRANGERS:
            self._send_away(next(iter(self._strangers)))
        self._strangers[caller] = self._now()
        self._of_host.setdefault(host, {})[caller] = None

    def _send_away(self, caller: Caller | Peer) -> None:
        self._complain(caller.host, caller.address, Refused("too many callers at once"))
        self._drop(caller)

    def _drop(self, caller: Caller | Peer) -> None:
        if isinstance(caller, Peer):
            self.let_go(caller)
        else:
            self._forget(caller)
            caller.close()

    def _forget(self, caller: Caller | Peer) -> None:
        """As a stranger."""
        if self._strangers.pop(caller, None) is None:
            return
        host = neighbourhood(caller.host)
        del self._of_host[host][caller]
        if not self._of_host[host]:
            del self._of_host[host]
        if not isinstance(caller, Peer):
            self.hub.unregister(caller.stream)

    # ── peers ────────────────────────────────────────────────────────────────────────────────────────────────────

    def seat(self, peer: Peer) -> None:
        """It has said who it is."""
        self._forget(peer)
        self.peers[peer.node] = peer

    def receive_visitor(self, peer: Peer) -> None:
        """It may come in, but only asks."""
        self._forget(peer)
        if len(self.visitors) >= MOST_VISITORS:
            self.let_go(next(iter(self.visitors)))
        self.visitors[peer] = None

    def let_go(self, peer: Peer) -> None:
        if not peer.is_closed:
            self.hub.unregister(peer.connection.stream)
            peer.connection.close()
        self._forget(peer)
        self.visitors.pop(peer, None)
        if self.peers.get(peer.node) is peer:
            del self.peers[peer.node]

    def close(self, why: str, code: int, comes_back: bool = False) -> None:
        """Say goodbye to everybody, wait a moment until they have heard it, and let go of the sockets."""
        for caller in [caller for caller in self._strangers if not isinstance(caller, Peer)]:
            self._drop(caller)
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
