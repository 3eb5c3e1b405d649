"""The strategies' decisions, on a clock that only moves when told: nodes that come and go, stop, or are far away."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest

from tests.test_state import a_pool, grants, join, kinds
from wide.coordinator.events import (
    ChangeStrategy,
    CloseStep,
    EndRun,
    GrantLease,
    LinkMeasured,
    MakeVersion,
    MergeUpdate,
    NodeJoined,
    NodeLeft,
    RejectUpdate,
    RunFailed,
    StrategyChosen,
    Ticked,
    UpdateArrived,
)
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_merged_exactly_once_whoever_comes_and_goes(seed, strategy):
    chance = random.Random(seed)
    pool = Pool(Schedule(100, 1, 11, seed=0), 12, None, strategy=strategy, is_eager=seed % 2 == 0)
    merged, versions, closed = play(pool, chance)
    assert sorted(merged) == list(range(pool.schedule.position(12)))
    assert versions == list(range(len(versions))), "versions only grow"
    assert closed == list(range(12)), "steps close in their order"


@pytest.mark.parametrize("seed", range(20))
def test_every_batch_is_merged_exactly_once_however_often_the_strategy_changes(seed):
    chance = random.Random(seed)
    pool = Pool(Schedule(100, 1, 11, seed=0), 30, None, strategy="local", is_eager=True)
    merged, versions, closed = play(pool, chance, change=0.05)
    assert sorted(merged) == list(range(pool.schedule.position(30)))
    assert versions == list(range(len(versions)))
    assert closed == list(range(30))


def play(pool, chance, change=0.0):
    """Nodes join, die, answer late or twice, at random, until the run ends."""
    now, leases, merged, versions, closed, names, ended = 0.0, {}, [], [], [], 0, False
    while not ended:
        now += chance.random()
        fate = chance.random()
        if not pool.members or fate < 0.05:
            names += 1
            leases[names] = []
            actions = pool.handle(NodeJoined(names), now)
        elif fate < 0.1:
            node = chance.choice(list(pool.members))
            del leases[node]
            actions = pool.handle(NodeLeft(node, "killed"), now)
        elif fate < 0.1 + change:
            actions = pool.handle(StrategyChosen(chance.choice(["sync", "async", "local"])), now)
        elif busy := [node for node, held in leases.items() if held]:
            node = chance.choice(busy)
            lease = leases[node][0] if chance.random() < 0.05 else leases[node].pop(0)  # some say it twice
            actions = pool.handle(UpdateArrived(node, lease.lease), now)
        else:
            actions = pool.handle(Ticked(), now)
        for action in actions:
            if isinstance(action, GrantLease):
                assert action.node in pool.members, "no lease to the dead"
                leases[action.node].append(action)
            elif isinstance(action, MergeUpdate):
                merged += range(*action.block)
            elif isinstance(action, MakeVersion):
                versions.append(action.version)
            elif isinstance(action, CloseStep):
                closed.append(action.step)
            ended = ended or isinstance(action, EndRun)
    return merged, versions, closed


def clockwork(pool, speeds, until, stops=None, travel_s=0.0):
    """Nodes that compute exactly as fast as they should, and answer in their order. Returns (batches by node, versions).
    Those that `stops` names say nothing any more from then on. Work travels for `travel_s`, and so do updates.
    """
    done, waiting, due, versions = dict.fromkeys(speeds, 0), {node: [] for node in speeds}, {}, []

    def carry_out(actions, now):
        for action in actions:
            if isinstance(action, GrantLease):
                waiting[action.node].append(action)
            elif isinstance(action, MakeVersion):
                versions.append(now)
        for node, held in waiting.items():
            if held and node not in due:
                end = now + 2 * travel_s + held[0].block.size / speeds[node]
                due[node] = end if end < (stops or {}).get(node, math.inf) else math.inf

    for node in speeds:
        carry_out(pool.handle(NodeJoined(node), 0.0), 0.0)
        pool.handle(LinkMeasured(node, 2 * travel_s), 0.0)
    now, ticked = 0.0, 0.0
    while now < until and not pool.is_over:
        node = min(due, key=due.get, default=None)
        now = min(due.get(node, math.inf), ticked + 0.05)
        if now == due.get(node):
            del due[node]
            lease = waiting[node].pop(0)
            done[node] += lease.block.size
            arrived = UpdateArrived(node, lease.lease, compute_s=lease.block.size / speeds[node])
            carry_out(pool.handle(arrived, now), now)
        else:
            ticked = now
            carry_out(pool.handle(Ticked(), now), now)
    return done, versions


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_a_node_four_times_slower_costs_nobody_else_anything(strategy):
    pool = Pool(Schedule(10**6, 1, 32, seed=0), None, None, strategy=strategy)
    speeds = {1: 100.0, 2: 100.0, 3: 100.0, 4: 25.0}
    done, _ = clockwork(pool, speeds, until=100.0)
    assert sum(done.values()) > 0.9 * 100 * sum(speeds.values())
    assert 0.5 < done[4] / (100 * 25) < 1.1


def test_local_rounds_end_together_so_that_nobody_works_on_old_weights():
    """Nodes that began at any time fall into step: a round's contributions arrive within a tenth of it."""
    pool = Pool(Schedule(10**6, 1, 16, seed=0), None, None, strategy="local")
    arrivals = []
    handle = pool.handle

    def listening(event, now):
        actions = handle(event, now)
        if isinstance(event, UpdateArrived):
            arrivals.append(now)
        if any(isinstance(action, MakeVersion) for action in actions):
            spreads.append((max(arrivals) - min(arrivals), now))
            arrivals.clear()
        return actions

    spreads = []
    pool.handle = listening
    clockwork(pool, {1: 103.0, 2: 71.0, 3: 160.0, 4: 25.0}, until=60.0)
    rounds = spreads[len(spreads) // 2 :]
    lasting = (rounds[-1][1] - rounds[0][1]) / (len(rounds) - 1)
    assert sorted(spread for spread, _ in rounds)[len(rounds) // 2] < 0.2 * lasting


def test_local_rounds_are_long_where_the_network_is_slow():
    lengths = {}
    for transfer_s in (0.0, 0.5):
        pool = Pool(Schedule(10**6, 1, 16, seed=0), None, None, strategy="local")
        queue, made = join(pool, 1, 2), []
        for node in (1, 2):
            pool.handle(LinkMeasured(node, transfer_s), 0.0)
        while len(made) < 2:  # the first round is there to see how quick they are
            lease = queue.pop(0)
            actions = pool.handle(UpdateArrived(lease.node, lease.lease), 0.01)
            made += [action.made for action in actions if isinstance(action, MakeVersion)]
            queue += grants(actions)
        lengths[transfer_s] = made[1].length
    assert lengths[0.5] > 5 * lengths[0.0]


def test_a_local_round_does_not_wait_for_a_node_that_stopped():
    pool = Pool(Schedule(10**6, 1, 16, seed=0), None, None, strategy="local")
    speeds = {1: 100.0, 2: 100.0, 3: 100.0, 4: 100.0}
    versions = clockwork(pool, speeds, until=10.0, stops={4: 5.0})[1]
    gaps = [b - a for a, b in pairwise(versions)]
    assert len([at for at in versions if at > 6]) > 10, "the others go on"
    assert max(gaps) < 5 * sorted(gaps)[len(gaps) // 2]


def test_an_async_update_that_is_too_old_is_refused_and_its_batches_are_leased_again():
    pool = Pool(Schedule(10**6, 1, 1, seed=0), None, None, strategy="async")
    (one,), (two,) = ([*grants(pool.handle(NodeJoined(node), 0.0))] for node in (1, 2))
    for i in range(1, 40):
        (one,) = grants(pool.handle(UpdateArrived(1, one.lease), i / 100))
    reject, *_ = pool.handle(UpdateArrived(2, two.lease), 0.5)
    assert (type(reject), reject.reason) == (RejectUpdate, "stale")
    again = {at for hole in pool.position(0.5).holes for at in range(*hole)}
    assert set(range(*two.block)) <= again


def test_an_old_async_update_counts_less():
    pool = Pool(Schedule(10**6, 1, 1, seed=0), None, None, strategy="async")
    (one,), (two,) = ([*grants(pool.handle(NodeJoined(node), 0.0))] for node in (1, 2))
    for i in range(1, 5):
        merge, *more = pool.handle(UpdateArrived(1, one.lease), i / 100)
        (one,) = grants(more)
        assert merge.discount == 1.0
    merge, *_ = pool.handle(UpdateArrived(2, two.lease), 0.05)
    assert merge.discount == 0.5


def test_a_run_without_steps_ends_in_time_in_every_strategy():
    for strategy in ("async", "local"):
        pool = Pool(Schedule(1000, 1, 4, seed=0), None, 10.0, strategy=strategy)
        (lease, *_) = grants(pool.handle(NodeJoined(1), 0.0))
        pool.handle(UpdateArrived(1, lease.lease), 1.0)
        actions = pool.handle(Ticked(), 10.0)
        assert isinstance(actions[-1], EndRun)


def test_a_diverging_run_ends_with_its_reason():
    _, end = a_pool().handle(RunFailed("the loss is 40, it was 2"), 1.0)
    assert (end.why, end.failure) == ("failed", "the loss is 40, it was 2")


def finished(strategy, speeds, steps=60, stops=None, travel_s=0.0, per_epoch=10**6):
    pool = Pool(Schedule(per_epoch, 1, 8, seed=0), steps, None, strategy=strategy)
    clockwork(pool, speeds, until=2000.0, stops=stops, travel_s=travel_s)
    return pool.is_over


@pytest.mark.parametrize("strategy", ["async", "local"])
@pytest.mark.parametrize("per_epoch", [3, 9, 25])
def test_short_steps_at_the_end_of_an_epoch_are_no_problem(strategy, per_epoch):
    assert finished(strategy, {1: 50.0, 2: 60.0}, per_epoch=per_epoch)


@pytest.mark.parametrize("travel_s", [0.1, 1.0, 3.0, 10.0])
def test_local_leases_that_travel_for_long_are_not_taken_for_lost(travel_s):
    assert finished("local", {1: 55.0, 2: 60.0}, travel_s=travel_s)


@pytest.mark.parametrize("strategy", ["async", "local"])
@pytest.mark.parametrize(
    "stops",
    [{1: 0.0}, {1: 2.0, 2: 2.0}, {1: 0.0, 2: 3.0}],
    ids=["one in its first lease", "most of them", "one after the other"],
)
def test_whoever_stops_answering_the_others_finish(strategy, stops):
    assert finished(strategy, {1: 50.0, 2: 50.0, 3: 50.0}, steps=200, stops=stops)


def test_the_result_of_an_expired_lease_counts_if_nobody_else_has_it():
    pool = Pool(Schedule(10**6, 1, 4, seed=0), None, None, strategy="async")
    (one,), (two,) = ([*grants(pool.handle(NodeJoined(node), 0.0))] for node in (1, 2))
    (one,) = grants(pool.handle(UpdateArrived(1, one.lease), 0.1))
    assert pool.handle(Ticked(), 99.0) == [], "everybody has something to do"
    assert not pool.leases.out, "but nobody is waited for"
    merge, *_ = pool.handle(UpdateArrived(2, two.lease), 99.0)
    assert (type(merge), merge.block) == (MergeUpdate, two.block)


def test_a_node_that_is_still_at_old_work_gets_none_of_the_new_strategy():
    pool = Pool(Schedule(10**6, 1, 2, seed=0), None, None, strategy="sync")
    one, two = join(pool, 1, 2)
    pool.handle(UpdateArrived(1, one.lease), 0.1)
    (rescue,) = grants(pool.handle(Ticked(), 30.0))
    assert (rescue.node, rescue.block) == (1, two.block)
    pool.handle(StrategyChosen("local"), 30.0)
    actions = pool.handle(UpdateArrived(1, rescue.lease), 30.1)
    assert ChangeStrategy in kinds(actions)
    assert {grant.node for grant in grants(actions)} == {1}
    assert {grant.node for grant in grants(pool.handle(UpdateArrived(2, two.lease), 31.0))} == {2}


def test_a_round_does_not_wait_for_work_that_somebody_else_has_done():
    """Most nodes hang, their hearts beat; what they hold was taken over and merged, so they are no part of a quorum."""
    pool = Pool(Schedule(1000, 1, 4, seed=0), 40, None, strategy="local")
    held = {grant.node: grant for grant in join(pool, 1, 2, 3, 4, 5)}
    now, queue = 1.0, [held[1]]
    pool.handle(StrategyChosen("async"), 0.5)  # so that nothing is free, and what is out is taken over
    pool.handle(StrategyChosen("local"), 0.5)
    while not pool.is_over:
        actions = pool.handle(UpdateArrived(1, queue.pop(0).lease), now) if queue else pool.handle(Ticked(), now)
        queue += [grant for grant in grants(actions) if grant.node == 1]
        now += 1.0
        assert now < 5000.0, pool.policy.waits_for
