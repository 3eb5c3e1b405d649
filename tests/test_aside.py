"""What takes long is done beside the loop, and everything else happens in its order all the same."""

from __future__ import annotations

import threading

import pytest

from faults.disk import Disk
from tests import plain
from tests.jobs import EVERYTHING, make
from tests.twin import Twin
from wide.coordinator import aside
from wide.coordinator.aside import Aside, afterwards
from wide.coordinator.events import ACTIONS, CloseStep, EvaluationFull, MakeVersion, Ticked
from wide.coordinator.queue import EventQueue
from wide.errors import TrainingFailed
from wide.exchange import inspection
from wide.store.weights import state_sha256, weights_sha256
from wide.strategy.synchronous import TreeFold
from wide.wire import messages as say


class Decisions:
    """A pool that answers each event with an action, and remembers when it was asked."""

    def __init__(self):
        self.heard = []

    def handle(self, event, now):
        self.heard.append((type(event), now))
        return [CloseStep(len(self.heard))]


class Desk:
    """A queue whose actions are carried out beside it, when the test says so."""

    def __init__(self, work=lambda: None):
        self.pool, self.now, self.done, self.may_go = Decisions(), 0.0, [], threading.Event()
        self.aside = Aside(aside.LARGE_NBYTES, lambda: self.rung.set())
        self.rung, self.work = threading.Event(), work
        performers = dict.fromkeys(ACTIONS, self.perform)
        self.queue = EventQueue(self.pool, performers, lambda: self.now)

    def perform(self, action):
        return self.aside.do(lambda: (self.may_go.wait(10), self.work()), lambda: self.done.append(action.step))

    def post(self, event, now):
        self.now = now
        self.queue.post(event)
        self.queue.work_off()

    def finish(self):
        """What is being done may end, and has."""
        self.rung.clear()
        self.may_go.set()
        assert self.rung.wait(10)
        self.queue.work_off()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.may_go.set()
    desk.aside.close()


def test_what_happens_meanwhile_waits_and_keeps_its_time(desk):
    called = []
    desk.post(Ticked(), 1.0)
    desk.post(EvaluationFull(), 2.0)
    desk.post(lambda: called.append("in its turn"), 3.0)
    assert (desk.pool.heard, desk.done, called) == ([(Ticked, 1.0)], [], [])
    desk.now = 9.0
    while len(desk.done) < 2:
        desk.finish()
    assert desk.pool.heard == [(Ticked, 1.0), (EvaluationFull, 2.0)]
    assert (desk.done, called) == ([1, 2], ["in its turn"])


def test_what_goes_wrong_beside_the_loop_is_raised_in_it():
    def work():
        raise TrainingFailed("the optimizer's step failed")

    desk = Desk(work)
    desk.post(Ticked(), 1.0)
    with pytest.raises(TrainingFailed, match="the optimizer's step failed"):
        desk.finish()
    assert desk.done == []
    desk.aside.close()


def test_what_was_decided_when_something_breaks_is_done_to_its_end(desk):
    desk.pool.handle = lambda event, now: [CloseStep(7), CloseStep(8)]
    desk.post(Ticked(), 1.0)
    desk.post(EvaluationFull(), 2.0)
    desk.may_go.set()
    desk.queue.finish()
    assert desk.done == [7, 8]


def test_what_was_decided_with_something_that_failed_is_not_done():
    desk = Desk()
    desk.pool.handle = lambda event, now: [CloseStep(7), CloseStep(8)]

    def fail():
        raise TrainingFailed("no")

    desk.work = fail
    desk.post(Ticked(), 1.0)
    with pytest.raises(TrainingFailed):
        desk.finish()
    desk.work = lambda: None
    desk.queue.finish()
    assert desk.done == []
    desk.aside.close()


def test_a_checkpoint_of_a_run_that_breaks_amid_a_merge_is_of_a_step_that_was_made(everything_is_large, monkeypatch):
    job, disk = make(), Disk()
    twin = Twin(job, disk, steps=5)
    node, queue, merge = twin.join(), twin.server._queue, TreeFold.merge

    def slowly(self, *arguments):
        threading.Event().wait(0.3)
        merge(self, *arguments)

    monkeypatch.setattr(TreeFold, "merge", slowly)
    while not any(isinstance(action, MakeVersion) for action in queue._actions):
        if queue._pending is not None:
            twin.turn()
        node.session.serve_next()
        twin.exchange.turn(0.0)
        twin.server._take_happenings()
    twin.now += 0.5  # time for a tick
    with pytest.raises(TrainingFailed, match="all nodes are gone"):
        twin.server.serve(lambda: "all nodes are gone")
    twin.writer.settle()
    saved = disk.newest()
    assert saved.step > 0
    assert state_sha256(saved.model) == weights_sha256(plain.train(job, saved.step))


def test_a_small_model_has_no_thread():
    began, order = threading.active_count(), []
    small = Aside(100)
    assert small.do(lambda: order.append("work"), lambda: order.append("then")) is None
    assert afterwards(None, lambda: order.append("and then")) is None
    assert (order, threading.active_count(), small.is_used) == (["work", "then", "and then"], began, False)


@pytest.fixture
def everything_is_large(monkeypatch):
    monkeypatch.setattr(aside, "LARGE_NBYTES", 0)
    monkeypatch.setattr(inspection, "LARGE_NBYTES", 0)


@pytest.mark.parametrize("beside", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("name", ["mlp", "batch norm, clipping, schedule"])
def test_a_pool_that_sums_and_steps_beside_its_loop_gives_the_same_bits(everything_is_large, name, beside):
    job = EVERYTHING[name]
    twin = Twin(job, shares=True, checkpoint_every=0.01)
    nodes = [twin.join(f"n{i}", is_beside=is_beside) for i, is_beside in enumerate(beside)]
    assert twin.run.aside.is_used
    assert weights_sha256(twin.train(*nodes)) == weights_sha256(plain.train(job, 5))
    assert twin.master.spare.in_use == 0


@pytest.mark.parametrize("compress", ["lz4", "int8"])
def test_differences_are_encoded_from_copies_that_were_made_beside_the_loop(everything_is_large, compress):
    job, hashes = make(), set()
    for shares in (False, True):
        twin = Twin(job, shares=shares, compress=compress)
        hashes.add(weights_sha256(twin.train(*(twin.join(f"n{i}") for i in range(2)))))
    assert compress != "lz4" or hashes == {weights_sha256(plain.train(job, 5))}


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_the_other_strategies_merge_every_batch_once_beside_their_loop(everything_is_large, strategy):
    twin = Twin(make(), strategy=strategy, steps=6)
    twin.train(*(twin.join(f"n{i}") for i in range(3)))
    batches = [(step // 3, at) for step, first, last, _ in twin.ledger() for at in range(first, last + 1)]
    assert sorted(batches) == [(epoch, at) for epoch in range(2) for at in range(11)]


def test_an_update_that_is_not_finite_is_refused_though_it_is_looked_through_later(everything_is_large):
    twin = Twin(make(), is_open=False)
    node = twin.join()
    work = node.connection.wait()
    touched = bytes(len(twin.master.layout.trainable) // 8 + 1)
    update = say.Update(work.lease, [1.0] * len(work.sizes), touched, 1.0, 0.0, 0.0, 1)
    node.connection.send(update, b"\xff" * twin.master.layout.live_nbytes)
    for _ in range(3):
        twin.turn()
    assert "not finite" in twin.run.ended.failure
