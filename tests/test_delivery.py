"""Work on its way out: one behind the other, whole, and never sent from memory that changes meanwhile."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import closing

import pytest
import torch
from torch import nn

from tests.jobs import make, points
from wide.codec.encoders import Encoders
from wide.coordinator.master import Master
from wide.exchange.delivery import Assignment, Delivery
from wide.exchange.feed import Feed
from wide.exchange.link_codecs import LinkCodecs
from wide.exchange.peer import Peer
from wide.exchange.switchboard import Switchboard
from wide.exchange.versions import Versions
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.telemetry.clock import REAL
from wide.telemetry.link import Link
from wide.transport.connection import Connection
from wide.transport.memory import MemoryHub, pair
from wide.wire import messages as say


class Desk:
    """A coordinator's outgoing half, and one peer at the end of a line in memory."""

    def __init__(self, compress):
        job = make(dataset=lambda: points(400), model=lambda: nn.Linear(600, 400))
        schedule = Schedule(400, 8, 4, seed=0)
        self.encoders = Encoders()
        self.master = Master(job, job.model(), seed=0)
        codecs = LinkCodecs(compress, self.master.layout.live_nbytes, self.encoders, tell=lambda choice: None)
        self.board = Switchboard(
            MemoryHub(lambda seconds, has_news: 0.0), lambda peer, why: None, lambda *_: None, REAL.now
        )
        self.versions = Versions(self.master.weights, self.master.layout, self.encoders)
        self.feed = Feed(Samples(job, 0), schedule)
        self.delivery = Delivery(self.versions, self.feed, codecs, self.encoders, self.board, self.master.spare)
        mine, theirs = pair()
        self.peer = Peer(Connection(mine), "there", 0.0, node=1, is_ready=True, has_data=True)
        self.peer.link.up = self.peer.link.down = Link(1e6)
        self.board.hub.register(mine, self.peer)
        self.board.seat(self.peer)
        codecs.decide(self.peer, 0, now=1.0)
        self.node = Connection(theirs, lambda message, nbytes: [memoryview(bytearray(nbytes))] if nbytes else [])
        self.node.reader.allow(self.node.reader.sink, 1 << 20, 1 << 30)

    def grant(self, lease, version, strategy="local", **more):
        self.delivery.deliver(self.peer, Assignment(lease, lease, lease + 1, 0, version, strategy), **more)

    def heard(self):
        while self.peer.outgoing.pending:
            self.delivery.pump(self.peer)
        return [type(message) for message in self.node.poll()]

    def close(self):
        self.encoders.close()
        self.feed.close()
        self.node.close()
        self.board.close("the run is over", 0)


@pytest.fixture
def desk(request):
    with closing(Desk(request.param)) as desk:
        yield desk


@pytest.mark.parametrize("desk", ["zstd"], indirect=True)
def test_the_next_work_is_said_after_all_parts_of_the_one_before(desk):
    desk.grant(1, version=0)
    desk.grant(2, version=0)  # while parts of the first are still being compressed
    said = desk.heard()
    assert said[0] is said[-1] is say.Work
    assert set(said[1:-1]) == {say.Part}
    assert len(said) > 3


@pytest.mark.parametrize("desk", ["none"], indirect=True)
def test_a_version_is_not_overwritten_while_it_may_still_be_on_its_way(desk):
    desk.peer.outgoing.pending.append((say.Part(), Future()))  # something is still to be sent before all that follows
    for version in range(4):
        desk.grant(version + 1, version)
    assert desk.peer.outgoing.sending == {0, 1, 2, 3}
    assert len(desk.versions._copies) == 4
    desk.peer.outgoing.pending.clear()
    with torch.no_grad():
        desk.master.weights.trainable[0].add_(1)
    desk.grant(5, version=4)
    assert len(desk.versions._copies) == 1, "then its memory is used again"


@pytest.mark.parametrize("desk", ["none", "zstd"], indirect=True)
def test_who_has_work_ahead_is_sent_the_weights_when_they_are_made(desk):
    desk.grant(1, 0, "sync")
    desk.delivery.answered(desk.peer, 1)
    desk.heard()
    desk.grant(2, 1, "sync", is_ahead=True)
    assert desk.heard() == [say.Work]
    assert not desk.peer.outgoing.is_at_work
    desk.delivery.release(1)
    first, *more = desk.heard()
    assert (first, set(more) <= {say.Part}) == (say.Weights, True)
    assert desk.peer.outgoing.is_at_work
    desk.delivery.release(2)
    assert desk.heard() == []


@pytest.mark.parametrize("desk", ["none"], indirect=True)
def test_new_weights_do_not_get_in_the_way_of_work_that_is_being_done_with_the_old_ones(desk):
    desk.grant(1, 0, "sync")
    desk.delivery.answered(desk.peer, 1)
    desk.grant(2, 1, "sync", is_ahead=True)
    desk.grant(3, 0, "sync")  # what a slow one holds
    desk.delivery.release(1)
    assert say.Weights not in desk.heard()
    desk.delivery.answered(desk.peer, 3)
    desk.delivery.refused(desk.peer, 3)
    assert desk.heard() == [say.Weights]
    assert desk.peer.outgoing.refused == 0  # it was told of that, too


@pytest.mark.parametrize("desk", ["none"], indirect=True)
def test_an_update_that_did_not_count_does_not_bring_weights_before_their_time(desk):
    desk.grant(1, 0, "sync")
    desk.delivery.answered(desk.peer, 1)
    desk.grant(2, 1, "sync", is_ahead=True)
    desk.heard()
    desk.delivery.refused(desk.peer, 1)
    assert desk.heard() == []
    desk.delivery.forget(desk.peer)
    desk.delivery.release(1)
    assert desk.heard() == []
