"""A node whose messages travel while it computes: both protocol ends back to back, no sockets, no waiting."""

from __future__ import annotations

import pytest
import torch

from tests.jobs import make
from tests.test_connection import a_node
from wide.wire import messages as say


@pytest.fixture(autouse=True)
def looking_all_the_time(monkeypatch):
    monkeypatch.setattr("wide.node.session.LOOK_OFTEN_S", -1.0)


def work(lease, strategy, batches=2, weights=b"", group=1, first=0, **more):
    sizes = [8] * batches
    message = say.Work(lease, [(0, first, batches, 32)], sizes, len(weights), strategy=strategy, group=group, **more)
    ids = torch.arange(8 * batches).numpy().data.cast("B")
    return message, ([memoryview(weights)] if weights else []) + [ids]


def send(coordinator, message, payload):
    coordinator.send(message, *payload)


def update(coordinator, sink):
    answer = coordinator.wait()
    return answer, torch.frombuffer(bytearray(sink.last), dtype=torch.float32)


def job():
    return make(model=lambda: torch.nn.Linear(6, 3), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


def test_local_leases_follow_each_other_and_each_delta_is_its_own():
    session, bench, coordinator, sink, _ = a_node(job())
    start = bytes(bench.trainer.weights.bytes)
    send(coordinator, *work(1, "local", weights=start))
    send(coordinator, *work(2, "local"))  # it is there before the first is done
    session.serve_next()
    first, one = update(coordinator, sink)
    session.serve_next()
    second, two = update(coordinator, sink)
    assert (first.lease, second.lease) == (1, 2)
    assert one.abs().sum() > 0
    assert not torch.equal(one, two)
    moved = torch.frombuffer(bytearray(start), dtype=torch.float32) - one - two
    assert torch.allclose(bench.trainer.bound.raw.view(torch.float32), moved, atol=1e-6)


def test_new_weights_in_the_middle_of_a_lease_are_taken_at_once_and_are_no_part_of_the_delta():
    session, bench, coordinator, sink, _ = a_node(job())
    start = bytes(bench.trainer.weights.bytes)
    elsewhere = torch.frombuffer(bytearray(start), dtype=torch.float32)
    slots = bench.trainer.layout.trainable
    for slot in slots:
        elsewhere[slot.offset // 4 : (slot.offset + slot.nbytes) // 4] += 3
    send(coordinator, *work(1, "local", weights=start))
    send(coordinator, *work(2, "local"))
    session.serve_next()
    update(coordinator, sink)
    send(coordinator, *work(3, "local", weights=elsewhere.numpy().tobytes()))  # the answer to the first update
    session.serve_next()
    _, second = update(coordinator, sink)
    assert second.abs().max() < 1
    for view in bench.trainer.bound.trainable:
        assert view.min() > 1, "it has gone on from the new weights"


def test_async_weights_wait_for_the_next_lease():
    session, bench, coordinator, sink, _ = a_node(job())
    start = bytes(bench.trainer.weights.bytes)
    send(coordinator, *work(1, "async", weights=start))
    session.serve_next()
    _, one = update(coordinator, sink)
    send(coordinator, *work(2, "async"))
    send(coordinator, *work(3, "async", weights=bytes(len(start))))
    session.serve_next()
    _, two = update(coordinator, sink)
    session.serve_next()
    _, three = update(coordinator, sink)
    assert torch.equal(one, two), "the same batches, the same weights"
    assert not torch.equal(two, three)


def test_a_node_can_change_its_strategy_with_every_lease():
    session, bench, coordinator, sink, _ = a_node(job())
    start = bytes(bench.trainer.weights.bytes)
    seen = {}
    for lease, strategy in enumerate(("sync", "local", "sync", "async", "local", "sync"), start=1):
        send(coordinator, *work(lease, strategy, weights=start))
        session.serve_next()
        seen.setdefault(strategy, []).append(update(coordinator, sink)[1])
    assert torch.equal(seen["sync"][0], seen["sync"][1])
    assert torch.equal(seen["sync"][0], seen["sync"][2])
    assert torch.allclose(seen["sync"][0], seen["async"][0], atol=1e-6)
    assert torch.allclose(seen["local"][0], seen["local"][1], atol=1e-6)


def test_a_stop_in_the_middle_of_a_lease_ends_a_node():
    session, bench, coordinator, _, _ = a_node(job())
    send(coordinator, *work(1, "local", weights=bytes(bench.trainer.weights.bytes)))
    coordinator.send(say.Stop("the run is over", 0))
    assert session.work() == say.Stop("the run is over", 0)


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_node_that_built_the_pools_weights_by_itself_need_not_be_sent_them(strategy):
    updates = []
    for weights in (True, False):
        session, bench, coordinator, sink, ready = a_node(job())
        start = bytes(bench.trainer.weights.bytes)
        assert ready.weights == bench.trainer.weights.fingerprint()
        send(coordinator, *work(1, strategy, weights=start if weights else b""))
        session.serve_next()
        updates.append(update(coordinator, sink)[1])
    assert torch.equal(*updates)
