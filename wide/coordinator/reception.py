"""From a caller's first word until it may be given work: who it is, whether it was here before, how far away it is, and
what it has built. Knows peers and the door; knows no leases.
"""

from __future__ import annotations

import functools

from wide.codec.pieces import MOST_PART_NBYTES
from wide.coordinator.door import Door, printable
from wide.coordinator.intake import Intake
from wide.coordinator.master import Master
from wide.coordinator.peer import Peer
from wide.coordinator.probe import Probing
from wide.coordinator.record import Record
from wide.coordinator.switchboard import Switchboard
from wide.errors import ProtocolError
from wide.telemetry.log import log
from wide.wire import messages as say

EVALUATOR = -1  # its place among the nodes
HEADER_LIMIT = 1 << 20  # a model of 10,000 tensors describes itself in less


class Reception:
    """A node that comes back after its connection broke is the same node; its old connection is of no use any more."""

    def __init__(self, door: Door, board: Switchboard, record: Record, intake: Intake, master: Master) -> None:
        self._door, self._board, self._record, self._intake = door, board, record, intake
        self._tensors, self.first_weights = master.layout.describe(), master.weights.fingerprint()
        self._payload_limit = max(master.layout.live_nbytes, MOST_PART_NBYTES)
        self._known: dict[str, int] = {}  # nodes by the key that only they know

    def former(self, hello: say.Hello) -> Peer | None:
        """The connection that this caller had before, if we still have it."""
        return self._board.peers.get(self._known.get(hello.key, 0))

    def welcome(self, peer: Peer, hello: say.Hello, is_evaluator: bool) -> None:
        peer.is_evaluator = is_evaluator
        peer.node = EVALUATOR if is_evaluator else self._known.get(hello.key, self._record.last_node + 1)
        peer.name = printable(hello.name)
        peer.is_on_this_machine = self._door.is_here(hello, peer.address)
        self._board.strangers.discard(peer)
        self._board.peers[peer.node] = peer
        peer.connection.reader.allow(functools.partial(self._intake.place_for, peer), HEADER_LIMIT, self._payload_limit)
        if not is_evaluator:
            self._register(peer, hello)
        self._board.send(peer, say.Welcome(peer.node, self._door.seed, self._door.data))
        if not is_evaluator:
            peer.probing = Probing()
            peer.probing.next(functools.partial(self._board.send, peer))

    def _register(self, peer: Peer, hello: say.Hello) -> None:
        if hello.key:
            self._known[hello.key] = peer.node
        if hello.build != self._door.build:
            log.warning(
                "node %s runs on %s, this coordinator on %s: bits may differ", peer.name, hello.build, self._door.build
            )
        peer.begin_totals(self._record.node_joined(peer.node, peer.name, printable(hello.host), hello.pid))

    def check(self, peer: Peer, ready: say.Ready) -> None:
        """Raises, if what the peer has built is not what the pool trains."""
        if peer.is_working:
            raise ProtocolError("out of order", "a second ready")
        if peer.up is None and not peer.is_evaluator:
            raise ProtocolError("out of order", "ready before the probe was said back")
        self._door.check_model(ready, self._tensors)
