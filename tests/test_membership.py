"""Coming, going, falling silent, coming back: decisions on a fake clock, then two ends back to back."""

from __future__ import annotations

import contextlib
import itertools
import threading

import pytest
import torch

from tests.front import Front
from tests.greet import NONCES, believed
from tests.jobs import make
from tests.test_connection import CPU, two_ends
from tests.test_state import a_pool, grants, join, kinds, with_a_slow_node
from wide.coordinator.events import (
    EndRun,
    MergeUpdate,
    NodeHeard,
    NodeJoined,
    NodeLeft,
    NodeSilent,
    Position,
    RejectUpdate,
    SaveCheckpoint,
    Ticked,
    UpdateArrived,
)
from wide.coordinator.leases import Lease
from wide.coordinator.roster import Member
from wide.coordinator.state import Pool
from wide.errors import ConnectionLost, Left, Unreachable
from wide.exchange import happenings as happened
from wide.exchange.patience import GONE_S, SILENT_S
from wide.job.schedule import Schedule
from wide.node.greeting import Identity
from wide.node.membership import Membership
from wide.node.pulse import Pulse
from wide.node.session import Session
from wide.node.trainer import Enough, Place, Trainer
from wide.node.workbench import Workbench
from wide.strategy.tree import Block
from wide.transport.connection import Connection
from wide.wire import messages as say
from wide.wire.proof import of_token


def measured(pool, *nodes):
    """Everybody has computed one batch, each in a second, and has another one."""
    first = {grant.node: grant for grant in join(pool, *nodes)}
    again = [grant for node in nodes for grant in grants(pool.handle(UpdateArrived(node, first[node].lease), 1.0))]
    return {grant.node: grant for grant in again}


def finished_by(pool, node, leases, now):
    """This one node does all that it is given until the run is over. Which batches it merged."""
    merged, queue = [], [lease for lease in leases if lease.node == node]
    while not pool.is_over:
        now += 1.0
        actions = pool.handle(UpdateArrived(node, queue.pop(0).lease), now) if queue else pool.handle(Ticked(), now)
        merged += [at for action in actions if isinstance(action, MergeUpdate) for at in range(*action.block)]
        queue += [grant for grant in grants(actions) if grant.node == node]
        assert now < 10_000.0, "it never ends"
    return merged


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_what_a_silent_node_holds_goes_to_others(strategy):
    pool = Pool(Schedule(1000, 1, 4, seed=0), 6, None, strategy=strategy)
    held = measured(pool, 1, 2)
    silent = held.get(2) or grants(pool.handle(Ticked(), 1.5))[0]
    leases = [held[1], *grants(pool.handle(NodeSilent(2), 2.0))]
    assert set(range(*silent.block)) <= set(finished_by(pool, 1, leases, 2.0))


def test_a_silent_node_is_given_nothing_until_it_is_heard_again():
    pool = a_pool(batches_per_step=2, steps=None)
    held = measured(pool, 1, 2)
    pool.handle(NodeSilent(2), 1.1)
    after = pool.handle(UpdateArrived(1, held[1].lease), 2.0)
    rescue = next(grant for grant in grants(after))
    assert (rescue.node, rescue.block) == (1, held[2].block)
    assert {grant.node for grant in grants(pool.handle(UpdateArrived(1, rescue.lease), 3.0))} == {1}
    late, *more = pool.handle(UpdateArrived(2, held[2].lease), 60.0)
    assert (type(late), late.reason, more) == (RejectUpdate, "late", [])
    assert [grant.node for grant in grants(pool.handle(NodeHeard(2), 60.0))] == [2]


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_lone_node_that_was_paused_hands_in_its_work_when_it_wakes(strategy):
    pool = Pool(Schedule(1000, 1, 4, seed=0), 5, None, strategy=strategy)
    held = measured(pool, 1)
    pool.handle(NodeSilent(1), 4.0)
    pool.handle(Ticked(), 5.0)
    pool.handle(NodeHeard(1), 60.0)
    assert isinstance(pool.handle(UpdateArrived(1, held[1].lease), 60.0)[0], MergeUpdate)


def test_the_time_in_which_a_node_was_silent_says_nothing_about_its_speed():
    pool = a_pool(steps=None)
    held = measured(pool, 1)
    speed = pool.members[1].batches_per_s
    pool.handle(NodeSilent(1), 4.0)
    pool.handle(NodeHeard(1), 60.0)
    pool.handle(UpdateArrived(1, held[1].lease), 60.0)
    assert pool.members[1].batches_per_s == speed


def test_a_duplicate_is_merged_once_and_answered_twice():
    pool, one, two = with_a_slow_node()
    (rescue,) = grants(pool.handle(UpdateArrived(1, one.lease), 11.0))
    pool.handle(NodeLeft(2, "killed"), 11.5)
    first = pool.handle(UpdateArrived(1, rescue.lease), 12.0)
    assert MergeUpdate in kinds(first)
    second = pool.handle(UpdateArrived(1, rescue.lease), 12.1)
    assert (kinds(second)[0], second[0].reason, MergeUpdate in kinds(second)) == (RejectUpdate, "duplicate", False)


def test_a_leases_deadline_follows_from_its_nodes_own_spread():
    steady, fickle = Member(1), Member(2)
    for i in range(12):
        for member, took in ((steady, 1.0), (fickle, 1.0 + i % 4)):
            member.measure(Lease(i, member.node, Block(i, i + 1), 0, 0, 10.0 * i, 0), 10.0 * i + took, 0.9, 99.0)
    assert steady.overdue == 2.0, "median + the least"
    assert fickle.overdue > 3.0, "it is often late: nobody jumps in too early"


def handed_in(strategy, batches, batches_per_step=8):
    """A node is at a lease of several batches when it has to go; what the pool makes of the first few."""
    pool = Pool(Schedule(1000, 1, batches_per_step, seed=0), 50, None, strategy=strategy)
    (held,) = measured(pool, 1).values()
    for now in itertools.count(2.0):
        if held.block.size >= 4:
            break
        (held,) = [g for g in grants(pool.handle(UpdateArrived(1, held.lease), now)) if g.node == 1]
    return pool, held, pool.handle(UpdateArrived(1, held.lease, batches=batches), now)


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_leaving_node_hands_in_what_it_has_finished_and_the_rest_goes_to_others(strategy):
    pool, held, actions = handed_in(strategy, batches=2)
    merge = actions[0]
    assert isinstance(merge, MergeUpdate)
    assert merge.block == Block(held.block.first, held.block.first + 2)
    assert grants(actions) == [], "it is leaving"
    pool.handle(NodeLeft(1, "it was told to leave"), 90.0)
    others = finished_by(pool, 2, join(pool, 2, now=91.0), 91.0)
    assert set(range(held.block.first + 2, held.block.end)) <= set(others)
    assert not set(range(*merge.block)) & set(others)


def test_in_sync_only_a_block_of_the_tree_can_be_handed_in():
    pool, held, (reject,) = handed_in("sync", batches=3)
    assert (type(reject), reject.reason) == (RejectUpdate, "wrong part")
    pool.handle(NodeLeft(1, "it was told to leave"), 90.0)
    assert set(range(*held.block)) <= set(finished_by(pool, 2, join(pool, 2, now=91.0), 91.0))


def test_a_time_limit_ends_a_pool_that_everybody_has_left():
    pool = a_pool(steps=None, seconds=10.0)
    join(pool, 1)
    pool.handle(NodeLeft(1, "killed"), 3.0)
    assert pool.handle(Ticked(), 9.9) == []
    assert isinstance(pool.handle(Ticked(), 10.0)[-1], EndRun)


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_pool_goes_on_from_where_another_one_was(strategy):
    schedule = Schedule(1000, 1, 4, seed=0)
    pool, merged, saved = Pool(schedule, 12, None, strategy=strategy, save_every_s=3.0), {}, Position()
    queue = join(pool, 1, 2, 3)
    for now in itertools.count(1):
        if pool.steps >= 6:
            break  # killed
        lease = queue.pop(0)
        for action in pool.handle(UpdateArrived(lease.node, lease.lease), float(now)):
            if isinstance(action, MergeUpdate):
                merged |= dict.fromkeys(range(*action.block), action.version)
            elif isinstance(action, SaveCheckpoint):
                saved = action.position
            queue += grants([action])
    assert saved.steps > 0
    kept = {at for at, version in merged.items() if version <= saved.version}
    holes = {at for hole in saved.holes for at in range(*hole)}
    assert kept == set(range(saved.front)) - holes, "the position is just what is in the weights"

    pool, again = Pool(schedule, 12, None, strategy=strategy, start=saved), []
    queue, now = join(pool, 7, 8), 1.0
    while not pool.is_over:
        now += 1.0
        actions = pool.handle(UpdateArrived(queue[0].node, queue.pop(0).lease), now) if queue else []
        actions = actions or pool.handle(Ticked(), now)
        again += [at for action in actions if isinstance(action, MergeUpdate) for at in range(*action.block)]
        queue += grants(actions)
    assert sorted([*kept, *again]) == list(range(schedule.position(12)))


def test_another_strategy_goes_on_where_one_stopped_in_the_middle_of_a_step():
    start = Position("async", version=3, steps=2, worth=3.0, front=14, holes=[Block(9, 11)], filled=0.25)
    pool = Pool(Schedule(1000, 1, 4, seed=0), 5, None, strategy="sync", start=start)
    queue, merged, now = join(pool, 1), [], 0.0
    while not pool.is_over:
        now += 1.0
        actions = pool.handle(UpdateArrived(1, queue.pop(0).lease), now) if queue else pool.handle(Ticked(), now)
        merged += [at for action in actions if isinstance(action, MergeUpdate) for at in range(*action.block)]
        queue += grants(actions)
    assert sorted(merged) == [9, 10, 14, 15, 16, 17, 18, 19]
    assert pool.strategy.name == "sync"


# ── two ends ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def front():
    with contextlib.closing(Front()) as front:
        yield front


def test_a_node_is_silent_after_three_beats_and_gone_after_a_minute(front):
    node = front.member()
    front.tick(110.0)
    front.tick(110.0 + SILENT_S)
    assert front.happened(happened.Silent) == []
    front.tick(110.1 + SILENT_S)
    front.tick(110.2 + SILENT_S)
    assert front.happened(happened.Silent, happened.Left) == [happened.Silent(1, "atlas")], "it is told once"
    node.send(say.Alive())
    front.turn()
    front.tick(150.0)
    assert front.happened(happened.Heard, happened.Left) == [happened.Heard(1, "atlas")]
    front.tick(150.0 + GONE_S)
    assert front.happened(happened.Left) == []
    front.tick(150.1 + GONE_S)
    assert [left.node for left in front.happened(happened.Left)] == [1]
    *_, goodbye = node.heard()
    assert (type(goodbye), goodbye.exit_code) == (say.Stop, 75), "it may come again"


def test_who_waits_for_work_is_told_that_somebody_is_there(front):
    node = front.member()
    front.tick(105.0)
    node.heard()
    front.tick(105.1)
    front.tick(106.0)
    assert node.heard() == []
    front.tick(106.2)
    assert node.heard() == [say.Alive()]
    front.lease(1)
    assert [type(message) for message in node.heard()] == [say.Work]
    for now in (107.0, 109.0, 112.0):
        front.tick(now)
    assert node.heard() == [], "whoever computes does not listen"


class Counting(Connection):
    """Knows when it was asked to send."""

    def __init__(self, stream):
        super().__init__(stream)
        self.beat = threading.Event()

    def send(self, message, *payload):
        super().send(message, *payload)
        self.beat.set()


def test_a_node_that_computes_for_long_says_that_it_is_alive(monkeypatch):
    monkeypatch.setattr("wide.node.pulse.BEAT_S", 0.01)
    node, coordinator, _ = two_ends()
    node = Counting(node.stream)
    with Pulse(node):
        assert node.beat.wait(20)
    assert coordinator.wait() == say.Alive()


def at_work(strategy, batches, group=0):
    """A node that was given one lease of several batches; it is told to leave while it computes the third."""
    job, asked = make(), []

    def loss(model, batch):
        asked.append(len(asked))
        if len(asked) == 3:
            session.leave("it has to go")
            session._began_at = -1e9  # so long that the rest would take for ever
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    node, coordinator, sink = two_ends()
    with contextlib.closing(Workbench(make(loss=loss), say.Welcome(1, job.seed, "auto"), CPU)) as bench:
        session = Session(node, bench)
        coordinator.wait()
        weights, ids = bench.trainer.weights.bytes, torch.arange(8 * batches)
        stretches, sizes = [(0, 0, batches, 8 * batches)], [8] * batches
        work = say.Work(1, stretches, sizes, len(weights), strategy=strategy, group=group)
        coordinator.send(work, weights, ids.numpy().data.cast("B"))
        with pytest.raises(Left):
            session.work()
    return coordinator.wait(), coordinator.wait()


@pytest.mark.parametrize(("strategy", "group", "expected"), [("sync", 0, 2), ("async", 0, 2), ("local", 1, 3)])
def test_a_node_that_has_to_go_sends_what_it_has_and_says_goodbye(strategy, group, expected):
    update, goodbye = at_work(strategy, batches=8, group=group)
    assert (type(update), update.lease, len(update.losses)) == (say.Update, 1, expected)
    assert goodbye == say.Leaving("it has to go")


@pytest.fixture
def fixed_nonces(monkeypatch):
    """So that a coordinator's answers can be made up beforehand."""
    monkeypatch.setattr("wide.transport.introduction.nonce", lambda: NONCES[0])


def test_a_broken_connection_is_made_again_and_what_was_built_is_kept(monkeypatch, fixed_nonces):
    monkeypatch.setattr("wide.node.membership.FIRST_PAUSE_S", 0.0)
    built, lines, dials = [], [], []

    def dial():
        dials.append(len(dials))
        if len(dials) in (2, 3):
            raise Unreachable("nobody answers")
        node, coordinator, _ = two_ends()
        believed(coordinator)
        coordinator.send(say.Welcome(7, 3, "auto"))
        coordinator.send(say.Probe(is_last=True))
        lines.append(coordinator)
        if len(lines) == 3:
            coordinator.send(say.Stop("the run is over", 0))
        elif len(lines) == 2:
            coordinator.send(say.Stop("you were away", 75))
        return node

    job = make(model=lambda: built.append(1) or torch.nn.Linear(6, 3))
    membership = Membership(dial, Identity(of_token("token"), "atlas", 1, CPU), lambda: job)
    assert membership.last(retry_s=60.0) == say.Stop("the run is over", 0)
    hellos = [line.wait() for line in lines if isinstance(line.wait(), say.Knock)]
    assert len(hellos) == 3
    assert len({hello.key for hello in hellos}) == 1, "it is the same node"
    assert built == [1]


def test_a_node_that_was_told_to_leave_does_not_look_for_a_pool_that_has_gone_meanwhile(fixed_nonces):
    def dial():
        node, coordinator, _ = two_ends()
        believed(coordinator)
        coordinator.send(say.Welcome(7, 3, "auto"))
        coordinator.send(say.Probe(is_last=True))
        membership._leaving_why = "it was told to leave"  # and its connection breaks before it could say so
        return node

    membership = Membership(dial, Identity(of_token("token"), "atlas", 1, CPU), make)
    with pytest.raises(Left):
        membership.last(retry_s=60.0)


def test_nothing_to_hand_in_is_no_failure_of_the_job():
    trainer = Trainer(make(), 3, CPU)

    def batch_at(i):
        raise Enough("it has to go")

    with pytest.raises(Enough):
        trainer.sum([Place(0, 0, 8, 1.0)], batch_at)


def test_a_pool_that_nobody_has_seen_yet_is_looked_for_just_as_long():
    calls = []

    def dial():
        calls.append(1)
        raise Unreachable("nobody answers")

    with pytest.raises(Unreachable):
        Membership(dial, Identity(of_token("token"), "atlas", 1, CPU), make).last(retry_s=0.2)
    assert len(calls) > 1


def test_a_node_that_should_not_look_again_leaves(fixed_nonces):
    def dial():
        node, coordinator, _ = two_ends()
        believed(coordinator)
        coordinator.send(say.Welcome(7, 3, "auto"))
        coordinator.send(say.Probe(is_last=True))
        return node

    with pytest.raises(ConnectionLost):
        Membership(dial, Identity(of_token("token"), "atlas", 1, CPU), make).last(retry_s=0.0)


def test_a_newcomer_is_a_member_until_it_leaves():
    pool = a_pool()
    pool.handle(NodeJoined(4), 0.0)
    pool.handle(NodeLeft(4, "killed"), 1.0)
    assert pool.handle(NodeSilent(4), 2.0) == pool.handle(NodeHeard(4), 3.0) == []
