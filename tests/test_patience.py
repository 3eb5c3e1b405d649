"""How long a peer may take, on a fake clock: no socket, no waiting."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.front import Front
from wide.exchange.happenings import Left, Rejected
from wide.exchange.patience import BATCHES, GREETING_S, STALL_S, Patience
from wide.wire import messages as say
from wide.wire.frames import encode


@pytest.fixture
def front():
    with closing(Front()) as front:
        yield front


def test_a_caller_has_a_while_to_say_hello_even_if_it_trickles(front):
    caller, called_at = front.call(), front.now
    for i in range(int(GREETING_S) + 1):
        front.tick(called_at + i)
        assert front.happened(Rejected) == []
        caller.stream.send([encode(say.Leaving("slow"))[i : i + 1]])
        front.turn()
    front.tick(called_at + GREETING_S + 1)
    assert [rejected.reason for rejected in front.happened(Rejected)] == ["refused"]
    (stop,) = caller.heard()
    assert "hello in time" in stop.why


def test_a_peer_that_has_nothing_to_say_may_be_silent_for_ever(front):
    front.greeted()  # and builds its model
    front.tick(110.0)
    front.tick(1e6)
    assert front.happened(Left) == []


def test_a_peer_that_stops_in_the_middle_of_a_message_is_dropped(front):
    caller = front.greeted()
    caller.stream.send([encode(say.Leaving("unfinished"))[:-1]])
    front.turn()
    front.tick(200.0)
    front.tick(200.0 + STALL_S / 2)
    assert front.happened(Rejected, Left) == []
    front.tick(200.0 + STALL_S)
    rejected, left = front.happened(Rejected, Left)
    assert rejected.reason == "stalled"
    assert "stopped in the middle of a message" in left.why


def test_a_slow_peer_is_not_a_stalled_one(front):
    caller = front.greeted()
    data = encode(say.Leaving("a message that takes its time"))
    for i in range(len(data) - 1):
        caller.stream.send([data[i : i + 1]])
        front.turn()
        front.tick(200.0 + i * STALL_S * 0.9)
        assert front.happened(Rejected, Left) == []


def test_a_peer_that_never_reads_is_dropped(front):
    node = front.member()
    front.tick(200.0)
    node.line.send = lambda buffers: 0  # the network takes nothing any more
    front.lease(1)
    front.tick(201.0)
    assert front.happened(Rejected, Left) == []
    front.tick(200.0 + STALL_S)
    rejected, left = front.happened(Rejected, Left)
    assert rejected.reason == "stalled"
    assert "does not read" in left.why


def test_whoever_is_long_at_a_batch_is_given_the_time_of_several():
    patience, batches_per_s = Patience(), 0.04
    for now in (0.0, 99.0):
        patience.look(received=7, sent=0, is_speaking=True, has_unsent=False, now=now)
    assert BATCHES / batches_per_s == 100.0 > STALL_S
    assert patience.exhausted(is_ready=False, batches_per_s=batches_per_s, now=99.0) is None
    assert patience.exhausted(is_ready=False, batches_per_s=batches_per_s, now=100.0).reason == "stalled"
    assert patience.exhausted(is_ready=False, batches_per_s=1.0, now=99.0).reason == "stalled"
