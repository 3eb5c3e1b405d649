"""How long a peer may take, on a fake clock: no socket, no waiting."""

from __future__ import annotations

from wide.coordinator.patience import GREETING_S, STALL_S, exhausted
from wide.coordinator.peer import Peer
from wide.transport.connection import Connection
from wide.transport.memory import pair
from wide.wire import messages as say
from wide.wire.frames import encode


def a_peer(node=1, most_nbytes=1 << 30):
    mine, theirs = pair(most_nbytes=most_nbytes)
    return Peer(Connection(mine), "here", connected_at=0.0, node=node), theirs


def test_a_caller_has_a_while_to_say_hello_even_if_it_trickles():
    peer, theirs = a_peer(node=0)
    for now in range(int(GREETING_S) + 1):
        assert exhausted(peer, now) is None
        theirs.send([encode(say.Leaving("slow"))[now : now + 1]])
        peer.connection.receive()
    assert "hello in time" in str(exhausted(peer, GREETING_S + 1))


def test_a_peer_that_has_nothing_to_say_may_be_silent_for_ever():
    peer, _ = a_peer()
    assert exhausted(peer, 0.0) is None
    assert exhausted(peer, 1e6) is None


def test_a_peer_that_stops_in_the_middle_of_a_message_is_dropped():
    peer, theirs = a_peer()
    theirs.send([encode(say.Leaving("unfinished"))[:-1]])
    peer.connection.receive()
    assert exhausted(peer, 100.0) is None
    assert exhausted(peer, 100.0 + STALL_S / 2) is None
    assert exhausted(peer, 100.0 + STALL_S).reason == "stalled"


def test_a_slow_peer_is_not_a_stalled_one():
    peer, theirs = a_peer()
    data = encode(say.Leaving("a message that takes its time"))
    for i in range(len(data) - 1):
        theirs.send([data[i : i + 1]])
        peer.connection.receive()
        assert exhausted(peer, i * STALL_S * 0.9) is None


def test_a_peer_that_never_reads_is_dropped():
    peer, _ = a_peer(most_nbytes=0)  # the network takes nothing
    peer.connection.send(say.Leaving("anybody there?"))
    assert exhausted(peer, 1.0) is None
    assert "does not read" in str(exhausted(peer, 1.0 + STALL_S))
