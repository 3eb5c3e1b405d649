"""The whole coordinator in simulated worlds: nodes that die, sleep, hang, lie and come back, from a seed.

More of it: `python -m benchmarks sim`.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace

import pytest

from faults.invariants import Violation
from faults.planted import MOST_NODES, PLANTED, caught
from faults.scenario import STRATEGIES, Scenario, draw
from faults.simulator import World


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_is_lost_or_doubled_whatever_happens(seed):
    world = World(seed, most_nodes=40).run()
    assert world.is_over


@pytest.mark.processes
@pytest.mark.parametrize("seed", range(20, 120))
def test_nor_in_many_more_worlds(seed):
    assert World(seed, most_nodes=40).run().is_over


@pytest.mark.processes
def test_these_worlds_are_unkind_and_of_all_kinds():
    worlds = [World(seed, most_nodes=40).run() for seed in range(30)]
    assert sum(world.faults for world in worlds) > 1000
    assert {world.scenario.strategy for world in worlds} == set(STRATEGIES)
    assert {world.scenario.may_change for world in worlds} == {True, False}
    assert any(world.lives > 2 for world in worlds)


def with_a_spike(drawn: Scenario) -> Scenario:
    """Honest nodes of unequal speed, where bits cannot tell who is right; late enough to be unlike all before."""
    middle = drawn.schedule.position(drawn.steps or drawn.schedule.step_at(200).number) // 2
    strategy = drawn.strategy if drawn.strategy != "sync" else "local"
    return replace(drawn, strategy=strategy, lies=0.0, poison=-1, spike=range(middle, middle + 8))


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.processes) for seed in range(4, 100))]
)
def test_a_spike_that_all_see_puts_nobody_in_quarantine(seed):
    assert World(seed, 12, of_its_kind=with_a_spike).run().is_over


@pytest.mark.processes
def test_a_pool_of_hundreds_is_no_different():
    seed = next(seed for seed in range(10_000) if draw(random.Random(seed)).nodes > 200)
    assert World(seed).run().most_nodes > 200


@pytest.mark.processes
@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_found(bug):
    assert caught(bug) is not None


def test_a_failing_seed_plays_the_same_schedule_again():
    seed = caught("leases_of_the_dead_kept")
    logs, problems = [], []
    with PLANTED["leases_of_the_dead_kept"]():
        for _ in range(2):
            logs.append([])
            with pytest.raises(Violation) as violation:
                World(seed, MOST_NODES, logs[-1]).run()
            problems.append(str(violation.value))
    assert len(logs[0]) > 50
    assert logs[0] == logs[1]
    assert problems[0] == problems[1]
    assert f"seed {seed}" in problems[0]


def test_a_seed_plays_the_same_schedule_in_every_process():
    logs = [[], []]
    World(15, 12, logs[0], of_its_kind=with_a_spike).run()
    others = [os.dup(0) for _ in range(300)]  # so shared memory has other, longer names
    try:
        World(15, 12, logs[1], of_its_kind=with_a_spike).run()
    finally:
        for file in others:
            os.close(file)
    assert len(logs[0]) > 50
    assert logs[0] == logs[1]
