"""The coordinator's decisions: events in, actions out, on a clock that only moves when told."""

from __future__ import annotations

from wide.coordinator.events import (
    ChangeStrategy,
    CloseStep,
    DropNode,
    EndRun,
    EvaluationCaughtUp,
    EvaluationFull,
    GrantLease,
    MakeVersion,
    MergeUpdate,
    NodeJoined,
    NodeLeft,
    RejectUpdate,
    SaveCheckpoint,
    StopRequested,
    StrategyChosen,
    TellOf,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule
from wide.strategy.tree import Block


def a_pool(batches_per_step=4, steps=3, seconds=None, samples=1000):
    return Pool(Schedule(samples, 1, batches_per_step, seed=0), steps, seconds)


def grants(actions):
    return [action for action in actions if isinstance(action, GrantLease)]


def join(pool, *nodes, now=0.0):
    return [grant for node in nodes for grant in grants(pool.handle(NodeJoined(node), now))]


def kinds(actions):
    return [type(action) for action in actions]


def test_a_newcomer_gets_one_batch_at_once():
    (grant,) = join(a_pool(), 1)
    assert (grant.node, grant.block) == (1, Block(0, 1))


def test_the_last_update_closes_the_step_and_opens_the_next():
    pool = a_pool(batches_per_step=2)
    one, two = join(pool, 1, 2)
    assert kinds(pool.handle(UpdateArrived(1, one.lease), 1.0)) == [MergeUpdate]
    actions = pool.handle(UpdateArrived(2, two.lease), 1.0)
    assert kinds(actions) == [MergeUpdate, MakeVersion, GrantLease, GrantLease, CloseStep]
    assert {pool.schedule.step_at(grant.block.first).number for grant in grants(actions)} == {1}
    assert pool.version == 1


def test_the_run_ends_after_its_last_step_and_says_nothing_more():
    pool = a_pool(batches_per_step=1, steps=1)
    (grant,) = join(pool, 1)
    assert kinds(pool.handle(UpdateArrived(1, grant.lease), 1.0)) == [
        MergeUpdate,
        MakeVersion,
        CloseStep,
        SaveCheckpoint,
        EndRun,
    ]
    assert pool.handle(NodeJoined(2), 2.0) == []


def test_the_run_ends_when_its_time_is_over():
    pool = a_pool(batches_per_step=1, steps=None, seconds=10)
    (grant,) = join(pool, 1, now=5.0)
    (grant,) = grants(pool.handle(UpdateArrived(1, grant.lease), 14.9))
    assert kinds(pool.handle(UpdateArrived(1, grant.lease), 15.0)) == [
        MergeUpdate,
        MakeVersion,
        CloseStep,
        SaveCheckpoint,
        EndRun,
    ]


def test_a_lease_is_granted_again_when_its_node_leaves():
    pool = a_pool(batches_per_step=2)
    one, two = join(pool, 1, 2)
    pool.handle(UpdateArrived(1, one.lease), 1.0)
    (again,) = grants(pool.handle(NodeLeft(2, "killed"), 1.5))
    assert (again.node, again.block) == (1, two.block)


def test_a_pool_without_nodes_waits_and_goes_on():
    pool = a_pool(batches_per_step=2)
    (grant,) = join(pool, 1)
    assert pool.handle(NodeLeft(1, "killed"), 1.0) == []
    assert pool.handle(Ticked(), 99.0) == []
    (again,) = join(pool, 2, now=100.0)
    assert again.block == grant.block


def test_an_update_counts_once():
    pool = a_pool()
    (grant,) = join(pool, 1)
    assert kinds(pool.handle(UpdateArrived(1, grant.lease), 1.0))[0] is MergeUpdate
    (reject,) = pool.handle(UpdateArrived(1, grant.lease), 1.1)
    assert (type(reject), reject.reason) == (RejectUpdate, "duplicate")


def test_an_update_for_somebody_elses_lease_is_rejected():
    pool = a_pool()
    one, _two = join(pool, 1, 2)
    (reject,) = pool.handle(UpdateArrived(2, one.lease), 1.0)
    assert reject.reason == "unknown lease"


def with_a_slow_node():
    """Node 2 needs ten times as long as node 1; it holds the only batch that is still out. Node 1 asks at time 24."""
    pool = a_pool(batches_per_step=2, steps=None)
    one, two = join(pool, 1, 2)
    pool.handle(UpdateArrived(1, one.lease), 1.0)
    one, two = grants(pool.handle(UpdateArrived(2, two.lease), 10.0))
    return pool, one, two


def test_an_idle_node_recomputes_what_a_slow_one_still_holds():
    pool, one, two = with_a_slow_node()
    actions = pool.handle(UpdateArrived(1, one.lease), 11.0)
    assert [(grant.node, grant.block) for grant in grants(actions)] == [(1, two.block)]


def test_the_first_result_wins_and_the_late_one_is_counted():
    pool, one, two = with_a_slow_node()
    (rescue,) = grants(pool.handle(UpdateArrived(1, one.lease), 11.0))
    assert kinds(pool.handle(UpdateArrived(1, rescue.lease), 12.0))[:2] == [MergeUpdate, MakeVersion]
    late, *_ = pool.handle(UpdateArrived(2, two.lease), 20.0)
    assert (type(late), late.reason) == (RejectUpdate, "late")
    assert all(lease.age == pool.version for lease in pool.members[2].leases.values())


def test_equal_nodes_do_not_compute_anything_twice():
    pool = a_pool(batches_per_step=2, steps=None)
    one, two = join(pool, 1, 2)
    pool.handle(UpdateArrived(1, one.lease), 1.0)
    one, two = grants(pool.handle(UpdateArrived(2, two.lease), 1.1))
    (ahead,) = grants(pool.handle(UpdateArrived(1, one.lease), 2.0))
    assert (ahead.version, ahead.block) == (pool.version + 1, Block(4, 5))  # of the next step
    assert grants(pool.handle(Ticked(), 2.1)) == []


def with_work_ahead(**more):
    """Two equal nodes; the first one is done with its half of step 1, and was given half of step 2."""
    pool = a_pool(batches_per_step=4, **{"steps": None} | more)
    one, two = join(pool, 1, 2)
    now = 1.0
    while pool.version == 0:
        (*_, one) = grants(pool.handle(UpdateArrived(1, one.lease), now)) or [one]
        (*_, two) = grants(pool.handle(UpdateArrived(2, two.lease), now)) or [two]
        now += 1.0
    one, two = (next(iter(pool.members[node].leases.values())) for node in (1, 2))
    actions = pool.handle(UpdateArrived(1, one.number), now)
    return pool, two, grants(actions), now


def test_who_is_done_early_gets_work_for_the_next_version_which_is_a_lease_once_that_is_made():
    pool, two, (ahead,), now = with_work_ahead()
    assert (ahead.node, ahead.version, ahead.block.first // 4) == (1, pool.version + 1, 2)
    assert not pool.members[1].leases
    actions = pool.handle(UpdateArrived(2, two.number), now + 0.5)
    assert [grant.node for grant in grants(actions)] == [2]
    (lease,) = pool.members[1].leases.values()
    assert (lease.number, lease.granted_at) == (ahead.lease, now + 0.5)
    assert kinds(pool.handle(UpdateArrived(1, ahead.lease), now + 1.0))[0] is MergeUpdate


def test_an_answer_to_work_that_was_not_begun_does_not_count():
    pool, _, (ahead,), now = with_work_ahead()
    (reject,) = pool.handle(UpdateArrived(1, ahead.lease), now)
    assert (type(reject), reject.reason) == (RejectUpdate, "unknown lease")


def test_there_is_nothing_ahead_of_the_last_step():
    _, _, ahead, _ = with_work_ahead(steps=2)
    assert ahead == []


def test_what_the_dead_had_ahead_is_leased_to_others():
    pool, two, (ahead,), now = with_work_ahead()
    assert pool.handle(NodeLeft(1, "killed", died=True), now) == []
    given = grants(pool.handle(UpdateArrived(2, two.number), now + 0.1))
    while len({at for grant in given for at in range(*grant.block)}) < 4:
        now += 1.0
        given += grants(pool.handle(UpdateArrived(2, given[-1].lease), now))
    assert {at for grant in given for at in range(*grant.block)} == set(range(8, 12))


def test_who_has_work_ahead_may_still_take_over_what_a_slow_one_holds():
    pool, two, (ahead,), now = with_work_ahead()
    (rescue,) = grants(pool.handle(Ticked(), now + 60.0))
    assert (rescue.node, rescue.block, rescue.version) == (1, two.block, pool.version)
    pool.handle(UpdateArrived(1, rescue.lease), now + 61.0)
    assert list(pool.members[1].leases) == [ahead.lease]
    late, *more = pool.handle(UpdateArrived(2, two.number), now + 62.0)
    assert (late.reason, len(grants(more))) == ("late", 1)


def test_a_strategy_that_ends_soon_ends_after_what_was_given_ahead():
    pool, two, (ahead,), now = with_work_ahead()
    pool.handle(StrategyChosen("async"), now)
    (other,) = grants(pool.handle(UpdateArrived(2, two.number), now + 0.1))
    pool.handle(UpdateArrived(2, other.lease), now + 1.0)
    actions = pool.handle(UpdateArrived(1, ahead.lease), now + 1.1)
    assert ChangeStrategy in kinds(actions)
    assert pool.steps == 3


def test_nobody_waits_for_a_newcomer_that_is_still_waiting_for_its_weights():
    pool = a_pool(batches_per_step=4, steps=None)
    (lease,), now = join(pool, 1), 0.0
    while pool.version < 6:  # a batch takes it a second
        now += lease.block.size
        (lease,) = grants(pool.handle(UpdateArrived(1, lease.lease), now))
    assert lease.block.size == 4
    assert join(pool, 2, now=now) == []
    *_, own, new = grants(pool.handle(UpdateArrived(1, lease.lease), now + 4.0))
    assert (own.node, new.node, new.block.size) == (1, 2, 1)
    now += 4.0
    taken = []
    while pool.version < 8 and not taken:
        now += own.block.size
        (own,) = grants(pool.handle(UpdateArrived(1, own.lease), now))
        taken = [own] if own.block == new.block else []
    assert taken
    assert now <= 4.0 * 7 + 3.0, "as soon as there was nothing else to do"


def test_a_lease_that_is_long_overdue_is_recomputed():
    pool = a_pool(batches_per_step=2, steps=None)
    one, two = join(pool, 1, 2)
    pool.handle(UpdateArrived(1, one.lease), 1.0)
    assert grants(pool.handle(Ticked(), 2.0)) == []
    (rescue,) = grants(pool.handle(Ticked(), 30.0))
    assert (rescue.node, rescue.block) == (1, two.block)


def test_a_rescued_block_survives_the_death_of_either_holder():
    pool, one, two = with_a_slow_node()
    (rescue,) = grants(pool.handle(UpdateArrived(1, one.lease), 11.0))
    assert pool.handle(NodeLeft(2, "killed"), 11.5) == []
    assert kinds(pool.handle(UpdateArrived(1, rescue.lease), 12.0))[:2] == [MergeUpdate, MakeVersion]


def test_faster_nodes_get_larger_leases():
    pool = a_pool(batches_per_step=64, steps=None)
    leases = {grant.node: grant for grant in join(pool, 1, 2)}
    sizes = {1: [], 2: []}  # in the second step
    now, due = 0.0, {1: 1.0, 2: 4.0}
    while pool.version < 2:
        node = min(due, key=due.get)
        now = due[node]
        actions = pool.handle(UpdateArrived(node, leases[node].lease), now)
        for grant in grants(actions):
            leases[grant.node] = grant
            if pool.schedule.step_at(grant.block.first).number == 1:
                sizes[grant.node].append(grant.block.size)
            due[grant.node] = now + grant.block.size * (1.0 if grant.node == 1 else 4.0)
        if not any(grant.node == node for grant in grants(actions)):
            due[node] = float("inf")
    assert max(sizes[1]) >= 2 * max(sizes[2])
    assert sizes[1][-1] < sizes[1][0], "they shrink as the step ends"
    assert now < 1.15 * (64 + 64) / 1.25 + 4, "and the pool is nearly as fast as its nodes together"


def test_a_failure_on_one_machine_is_tried_on_another():
    pool = a_pool()
    one, _two = join(pool, 1, 2)
    actions = pool.handle(WorkFailed(1, one.lease, 0, "out of memory"), 1.0)
    assert kinds(actions) == [RejectUpdate, DropNode]
    assert pool.members.keys() == {2}


def test_who_has_failed_where_another_one_does_not_is_told_of():
    pool = a_pool()
    one, _two = join(pool, 1, 2)
    assert one.block == Block(0, 1)
    pool.handle(WorkFailed(1, one.lease, 0, "not finite"), 1.0)
    done, told = [], []
    while Block(0, 1) not in done:
        (lease,) = pool.members[2].leases.values()
        done.append(lease.block)
        told += [it for it in pool.handle(UpdateArrived(2, lease.number), 2.0) if isinstance(it, TellOf)]
    assert told == [TellOf(1, "faulty", "step 0, batch 0: it failed there, and node 2 did not")]


def test_a_failure_on_two_machines_is_the_jobs_own():
    pool = a_pool(batches_per_step=1)
    (one,) = join(pool, 1, 2)
    _reject, drop, again = pool.handle(WorkFailed(1, one.lease, 0, "ValueError: bad image (job.py:4)"), 1.0)
    assert (type(drop), again.node) == (DropNode, 2)
    *_, end = pool.handle(WorkFailed(2, again.lease, 0, "ValueError: bad image (job.py:4)"), 2.0)
    assert isinstance(end, EndRun)
    assert "step 0, batch 0, node 2: ValueError: bad image (job.py:4)" in end.failure


def test_a_failure_on_the_only_node_ends_the_run():
    pool = a_pool()
    (one,) = join(pool, 1)
    assert kinds(pool.handle(WorkFailed(1, one.lease, 0, "no"), 1.0)) == [RejectUpdate, SaveCheckpoint, EndRun]


def test_a_failure_on_the_only_node_of_an_open_pool_leaves_the_work_to_others():
    pool = Pool(Schedule(1000, 1, 1, seed=0), 3, None, is_open=True)
    (one,) = join(pool, 1)
    assert kinds(pool.handle(WorkFailed(1, one.lease, 0, "no"), 1.0)) == [RejectUpdate, DropNode]
    (again,) = join(pool, 2)
    assert again.block == one.block


def test_unsound_numbers_are_never_merged():
    pool = a_pool()
    one, _two = join(pool, 1, 2)
    actions = pool.handle(UpdateArrived(1, one.lease, "the gradient is not finite"), 1.0)
    assert MergeUpdate not in kinds(actions)
    assert DropNode in kinds(actions)


def test_a_request_to_stop_ends_the_run():
    assert kinds(a_pool().handle(StopRequested("SIGTERM"), 1.0)) == [SaveCheckpoint, EndRun]


def test_nobody_is_given_work_while_too_many_weights_wait_to_be_evaluated():
    pool = a_pool(batches_per_step=1, steps=None)
    (grant,) = join(pool, 1)
    assert pool.handle(EvaluationFull(), 1.0) == []
    assert kinds(pool.handle(UpdateArrived(1, grant.lease), 2.0)) == [MergeUpdate, MakeVersion, CloseStep]
    assert pool.handle(Ticked(), 3.0) == pool.handle(NodeJoined(2), 4.0) == []
    assert {grant.node for grant in grants(pool.handle(EvaluationCaughtUp(), 5.0))} == {1}
