"""A run's owner pauses it, goes on, saves, stops, sends a node away; and gets the bits that there would have been."""

from __future__ import annotations

import sqlite3
import threading

import pytest

from faults.disk import Disk
from tests import plain
from tests.jobs import make
from tests.test_state import a_pool, grants, join, kinds
from tests.twin import Twin
from wide.coordinator.events import (
    CheckpointRequested,
    EndRun,
    EvaluationCaughtUp,
    EvaluationFull,
    NodeJoined,
    PauseRequested,
    ResumeRequested,
    SaveCheckpoint,
    Ticked,
    UpdateArrived,
)
from wide.coordinator.picture import PAUSED
from wide.coordinator.state import Pool
from wide.errors import NotYet, UsageError
from wide.job.schedule import Schedule
from wide.store import wishes
from wide.store.lock import FolderLock
from wide.store.rundb import RunDb
from wide.store.weights import weights_sha256
from wide.store.wishes import Wish, Wishes, ask


class Owner:
    """Asks, and is answered."""

    def __init__(self):
        self.wishes, self.answers, self.is_paused = [], [], False

    def want(self, what, node=None):
        self.wishes.append(Wish(len(self.answers) + len(self.wishes) + 1, what, node))

    def new(self):
        found, self.wishes = self.wishes, []
        return found

    def answer(self, wish, words):
        self.answers.append((wish.what, words))


# ── decisions ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_while_it_is_paused_what_is_out_is_merged_and_nothing_is_leased():
    pool = a_pool(batches_per_step=4)
    one, two = join(pool, 1, 2)
    assert pool.handle(PauseRequested(), 1.0) == []
    assert kinds(pool.handle(UpdateArrived(1, one.lease), 1.0))[0].__name__ == "MergeUpdate"
    assert grants(pool.handle(UpdateArrived(2, two.lease), 1.0)) == []
    assert grants(pool.handle(Ticked(), 2.0)) == []
    assert grants(pool.handle(NodeJoined(3), 2.0)) == []
    assert {grant.node for grant in grants(pool.handle(ResumeRequested(), 3.0))} == {1, 2}


def test_to_go_on_twice_or_without_a_pause_changes_nothing():
    pool = a_pool()
    join(pool, 1)
    assert pool.handle(ResumeRequested(), 1.0) == []
    pool.handle(PauseRequested(), 1.0)
    pool.handle(PauseRequested(), 1.0)
    pool.handle(ResumeRequested(), 1.0)
    assert not pool.is_paused
    assert pool.handle(ResumeRequested(), 1.0) == []


@pytest.mark.parametrize("last", ["evaluation", "owner"])
def test_an_owner_and_an_evaluation_both_have_to_let_it_go_on(last):
    pool = a_pool()
    (one,) = join(pool, 1)
    pool.handle(EvaluationFull(), 1.0)
    pool.handle(PauseRequested(), 1.0)
    pool.handle(UpdateArrived(1, one.lease), 1.0)
    first, second = [EvaluationCaughtUp(), ResumeRequested()][:: 1 if last == "owner" else -1]
    assert grants(pool.handle(first, 2.0)) == []
    assert len(grants(pool.handle(second, 3.0))) == 1


def test_a_time_limit_ends_a_run_that_is_paused():
    pool = a_pool(seconds=10.0)
    join(pool, 1)
    pool.handle(PauseRequested(), 1.0)
    assert pool.handle(Ticked(), 9.0) == []
    assert kinds(pool.handle(Ticked(), 11.0)) == [SaveCheckpoint, EndRun]


def test_a_checkpoint_is_saved_at_once_where_the_weights_are_whole():
    pool = a_pool(batches_per_step=4)
    (one,) = join(pool, 1)
    pool.handle(UpdateArrived(1, one.lease), 1.0)  # in the middle of a step
    (save,) = pool.handle(CheckpointRequested(), 1.0)
    assert (save.position.front, save.position.steps, save.position.version) == (0, 0, 0)


def test_and_with_the_next_version_where_something_would_be_lost():
    pool = Pool(Schedule(1000, 1, 4, seed=0), 3, None, strategy="async", save_every_s=1e9)
    leases, saved, now = join(pool, 1, 2), [], 1.0
    leases += grants(pool.handle(UpdateArrived(1, leases.pop(0).lease), now))
    assert pool.policy.pending
    assert pool.handle(CheckpointRequested(), now) == []
    while not saved:
        now, lease = now + 1.0, leases.pop(0)
        actions = [*pool.handle(UpdateArrived(lease.node, lease.lease), now), *pool.handle(Ticked(), now)]
        leases += grants(actions)
        saved = [action for action in actions if isinstance(action, SaveCheckpoint)]
    assert not pool.policy.pending


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_and_if_it_is_paused_a_version_is_made_of_what_there_is(strategy):
    pool = Pool(Schedule(1000, 1, 8, seed=0), 3, None, strategy=strategy, save_every_s=1e9)
    leases = join(pool, 1, 2)
    pool.handle(PauseRequested(), 1.0)
    pool.handle(UpdateArrived(leases[0].node, leases[0].lease, batches=leases[0].block.size), 1.0)
    if pool.policy.pending:
        assert pool.handle(CheckpointRequested(), 1.0) == []  # somebody still computes
    for lease in leases[1:]:
        pool.handle(UpdateArrived(lease.node, lease.lease, batches=lease.block.size), 2.0)
    actions = pool.handle(Ticked(), 3.0) or pool.handle(CheckpointRequested(), 3.0)
    assert kinds(actions)[-1] is SaveCheckpoint
    assert actions[-1].position.holes == []
    assert not pool.policy.pending


# ── the whole server ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_that_was_paused_has_the_bits_of_the_plain_program():
    owner, job = Owner(), make()
    twin = Twin(job, asked=owner, steps=6)
    nodes = [twin.join(f"n{i}") for i in range(2)]
    for _ in range(3):
        for node in nodes:
            node.work()
        twin.turn()
    owner.want("pause")
    twin.turn(0.3)
    for _ in range(100):
        for node in nodes:
            node.work()
        twin.turn()
    assert twin.pool.is_paused
    assert not any(member.leases for member in twin.pool.members.values())
    twin.turn(1.0)
    assert twin.server._window.latest.is_paused
    assert twin.server._window.latest.verdict == PAUSED
    owner.want("resume")
    assert weights_sha256(twin.train(*nodes)) == weights_sha256(plain.train(job, 6))
    assert [what for what, _ in owner.answers] == ["pause", "resume"]


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_who_goes_on_from_a_checkpoint_that_was_wished_for_loses_and_doubles_nothing(strategy):
    owner, job, disk = Owner(), make(), Disk()
    first = Twin(job, disk, asked=owner, steps=6, strategy=strategy, checkpoint_every=1e9)
    nodes = [first.join(f"n{i}") for i in range(2)]
    while first.pool.steps < 2:
        for node in nodes:
            node.work()
        first.turn()
    owner.want("checkpoint")
    first.turn(0.3)
    for _ in range(400):
        for node in nodes:
            node.work()
        first.turn()
        first.writer.settle()
        if disk.newest() is not None:
            break
    assert disk.newest() is not None
    second = Twin(job, disk, steps=6, strategy=strategy)  # the first one was killed
    model = second.train(*(second.join(f"m{i}") for i in range(2)))
    if strategy == "sync":
        assert weights_sha256(model) == weights_sha256(plain.train(job, 6))
    batches = [(step, batch) for step, a, b, _ in second.ledger() for batch in range(a, b + 1)]
    assert len(batches) == len(set(batches))


def test_a_node_that_is_sent_away_hears_it_and_its_work_is_done_by_others():
    owner, job = Owner(), make()
    twin = Twin(job, asked=owner, steps=6, is_open=False)
    one, two = twin.join("one"), twin.join("two")
    owner.want("drop", one.number)
    owner.want("drop", 99)
    twin.turn(0.3)
    assert weights_sha256(twin.train(one, two)) == weights_sha256(plain.train(job, 6))
    assert (one.stop.exit_code, "sent this node away" in one.stop.why) == (77, True)
    assert owner.answers[0] == ("drop", f"node {one.number} is sent away")
    assert owner.answers[1][1].startswith("no: there is no node 99")


def test_a_pool_that_begins_anew_is_still_paused():
    owner = Owner()
    first = Twin(make(), asked=owner)
    owner.want("pause")
    first.turn(0.3)
    again = Twin(make(), asked=owner)
    node = again.join()
    again.turn(0.3)
    assert again.pool.is_paused
    assert not again.pool.members[node.number].leases
    owner.want("resume")
    again.turn(0.3)
    assert again.pool.members[node.number].leases
    assert not owner.is_paused


def test_two_who_are_sent_away_at_once_do_not_leave_nobody():
    owner = Owner()
    twin = Twin(make(), asked=owner, is_open=False)
    for node in (twin.join("one"), twin.join("two")):
        owner.want("drop", node.number)
    twin.turn(0.3)
    assert ["is sent away" in words for _, words in owner.answers] == [True, False]
    assert len(twin.pool.members) == 1


def test_the_only_node_of_a_closed_pool_stays():
    owner = Owner()
    twin = Twin(make(), asked=owner, is_open=False)
    node = twin.join()
    owner.want("drop", node.number)
    twin.turn(0.3)
    assert "the only one" in owner.answers[0][1]
    assert node.number in twin.pool.members


def test_what_nobody_understands_is_refused():
    owner = Owner()
    twin = Twin(make(), asked=owner)
    owner.want("format the disk")
    owner.want("drop")
    twin.turn(0.3)
    assert [words[:4] for _, words in owner.answers] == ["no: ", "no: "]


# ── by way of run.db ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def coordinator(tmp_path):
    """Of the run in that folder, as far as wishes go."""
    lock, db = FolderLock(tmp_path), RunDb(tmp_path / "run.db")
    mine = Wishes(tmp_path / "run.db", db.write)
    yield mine
    mine.close()
    db.close()
    lock.close()


def obey(coordinator, answer, seen):
    """Until something was asked for."""
    while not seen:
        for wish in coordinator.new():
            seen.append(wish)
            coordinator.answer(wish, answer)


@pytest.mark.parametrize("answer", ["it goes on", "no: it is the only one"])
def test_what_is_asked_is_answered_once(coordinator, tmp_path, answer, monkeypatch):
    monkeypatch.setattr(wishes, "is_held", lambda folder: True)  # the system's locks are between processes
    seen = []
    thread = threading.Thread(target=obey, args=(coordinator, answer, seen))
    thread.start()
    if answer.startswith("no"):
        with pytest.raises(UsageError, match="^it is the only one"):
            ask(tmp_path, "drop", 7)
    else:
        assert ask(tmp_path, "drop", 7) == answer
    thread.join()
    assert [(wish.what, wish.node) for wish in seen] == [("drop", 7)]
    assert coordinator.new() == []
    with sqlite3.connect(tmp_path / "run.db") as db:
        assert db.execute("SELECT count(*) FROM wishes").fetchone() == (0,)


def test_nobody_is_asked_where_nobody_trains(tmp_path):
    RunDb(tmp_path / "run.db").close()
    with pytest.raises(NotYet, match="not going on"):
        ask(tmp_path, "stop")


def test_a_wish_that_is_not_answered_is_taken_back(coordinator, tmp_path):
    with pytest.raises(NotYet, match="not answered"):
        ask(tmp_path, "stop", patience_s=0.2)
    assert coordinator.new() == []


def test_wishes_of_before_are_not_those_of_now(tmp_path):
    db = RunDb(tmp_path / "run.db")
    db.insert("wishes", [(None, "stop", None, None)])
    db.settle(10.0)
    wishes.forget(tmp_path)
    mine = Wishes(tmp_path / "run.db", db.write)
    assert mine.new() == []
    db.insert("wishes", [(None, "pause", None, None)])
    db.settle(10.0)
    assert [wish.what for wish in mine.new()] == ["pause"]
    mine.close()
    db.close()
