"""Checks, and what happens to who makes them meanwhile: facts about the whole pure state machine, on a fake clock."""

from __future__ import annotations

import pytest

from wide.coordinator.audits import Audits
from wide.coordinator.canaries import Canaries
from wide.coordinator.events import (
    Confirm,
    DropNode,
    EndRun,
    GrantLease,
    MakeVersion,
    NameNode,
    NodeJoined,
    NodeLeft,
    TellOf,
    Ticked,
    UpdateArrived,
    WorkFailed,
)
from wide.coordinator.leases import Lease
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule
from wide.strategy.tree import Block

WRONG, PROBLEM = -1, "the gradient is not finite"


class Checked:
    """A pool, what it has given to whom, and what it has said. Nodes compute in no time, unless they are told to wait."""

    def __init__(self, *nodes: int, strategy: str = "sync", is_open: bool = True, audit: float = 0.0) -> None:
        schedule = Schedule(4000, 1, 4, seed=0)
        self.audits, canaries = Audits(audit, lambda: 0.0), Canaries(is_lossless=True)
        self.pool = Pool(schedule, 500, None, is_open=is_open, strategy=strategy, audits=self.audits, canaries=canaries)
        self.now, self.versions = 0.0, 0
        self.given: dict[int, list[GrantLease]] = {}
        self.told: list[tuple[int, str]] = []
        self.named: list[int] = []
        self.confirmed: list[tuple[int, Block]] = []
        self.ended: EndRun | None = None
        for node in nodes:
            self.join(node)

    def happens(self, event) -> None:
        for action in self.pool.handle(event, self.now):
            if isinstance(action, GrantLease):
                self.given[action.node].append(action)
            elif isinstance(action, NameNode | DropNode):
                self.given.pop(action.node, None)
                self.named += [action.node] if isinstance(action, NameNode) else []
            elif isinstance(action, Confirm):
                self.confirmed.append((action.node, action.block))
            elif isinstance(action, TellOf):
                self.told.append((action.node, action.kind))
            elif isinstance(action, EndRun):
                self.ended = action
            self.versions += isinstance(action, MakeVersion)

    def join(self, node: int) -> None:
        self.given[node] = []
        self.happens(NodeJoined(node))

    def leave(self, node: int) -> None:
        self.given.pop(node, None)
        self.happens(NodeLeft(node, "it left", False))

    def task(self, node: int) -> GrantLease | None:
        return next((task for task in self.given.get(node, ()) if task.version <= self.pool.version), None)

    def answer(self, node: int, digest: int | None = None, problem: str = "", batches: int | None = None) -> GrantLease:
        """What it was given first; the right digest is that of its batches."""
        task = self.task(node)
        assert task is not None, f"node {node} has nothing to do"
        self.given[node].remove(task)
        said = hash(task.block) if digest is None else digest
        distance = 0.0 if task.pair and not any(other.pair == task.pair for other in self.out()) else None
        self.happens(UpdateArrived(node, task.lease, problem, 0.1, batches or task.block.size, said, distance))
        return task

    def out(self) -> list[GrantLease]:
        return [task for tasks in self.given.values() for task in tasks]

    def go_on(self, seconds: float, *nodes: int) -> int:
        """These nodes do all that they are given, rightly. How many versions were made?"""
        before = self.versions
        for _ in range(int(seconds / 0.1)):
            self.now += 0.1
            self.happens(Ticked())
            for node in nodes:
                if self.ended is None and self.task(node) is not None:
                    self.answer(node)
        return self.versions - before


def with_two_that_differ(**more) -> Checked:
    """Node 2 has contradicted node 1, and nobody knows yet who is right."""
    pool = Checked(1, 2, **more)
    first = pool.answer(1, WRONG)
    while (task := pool.task(2)) and not task.is_check:
        pool.answer(2)
    assert task is not None
    assert task.block == first.block
    pool.answer(2)
    return pool


@pytest.mark.parametrize("is_open", [True, False])
def test_who_is_left_after_two_have_differed_goes_on_alone(is_open):
    pool = with_two_that_differ(is_open=is_open)
    pool.leave(1)
    assert pool.go_on(10, 2) > 5
    assert (pool.ended, pool.named, pool.told) == (None, [], [])


def test_who_is_held_because_of_another_one_is_free_when_that_one_has_left():
    pool = with_two_that_differ()
    while ("held" not in [kind for _, kind in pool.told]) and pool.now < 60:
        pool.now += 0.1
        pool.happens(Ticked())
        for node in (1, 2):
            if pool.task(node) is not None:
                pool.answer(node, WRONG if node == 1 and pool.task(node).is_check else None)
    assert pool.audits.held
    pool.leave(1)
    assert not pool.audits.held
    assert pool.go_on(10, 2) > 5


def test_who_hands_in_its_last_part_and_stays_is_not_waited_for():
    pool = Checked(1, 2, 3)
    pool.go_on(2, 1, 2, 3)
    while pool.task(3) is None or pool.task(3).block.size == 1:
        pool.go_on(0.1, 1, 2)
    pool.answer(3, batches=1)
    first = pool.answer(1, WRONG) if pool.task(1) else None
    assert first is not None
    pool.audits.begin(Lease(first.lease, 1, first.block, 0, 0, pool.now, 0), first.block, WRONG, {1, 2}, pool.now)
    for _ in range(100):
        pool.go_on(0.1)
        for node in (1, 2):
            if (task := pool.task(node)) is not None:
                pool.answer(node, WRONG if node == 1 and task.block == first.block else None)
    assert (1, "held") in pool.told


def test_nobody_waits_for_a_check_by_a_slow_node_if_a_quick_one_is_idle():
    pool = Checked(1, 2, 3)
    for _ in range(8):
        pool.go_on(5, 1, 2)
        if pool.task(3) is not None:
            pool.answer(3)
    pool.audits.verified.clear()
    while (task := pool.task(3)) is None or not task.is_check:
        if task is not None:
            pool.answer(3)
        pool.go_on(0.1, 1)
    assert pool.go_on(3, 1, 2) > 3
    assert pool.task(3) == task, "it is at it all the time"


def beside_each_other(**more) -> tuple[Checked, GrantLease]:
    """Chance has chosen what node 1 is at, and node 2 computes it, too."""
    pool = Checked(1, 2, 3, audit=1.0, **more)
    pool.audits.verified |= {1: 0.0, 2: 0.0, 3: 0.0}
    check = pool.task(2)
    assert check is not None
    assert check.is_check
    assert check.block == pool.task(1).block
    return pool, check


def test_what_chance_has_chosen_is_computed_at_the_same_time():
    pool, check = beside_each_other()
    pool.answer(2)
    pool.answer(1)
    assert not pool.audits.open, "nobody waits any more"
    assert (1, check.block) in pool.confirmed


def test_and_who_is_wrong_there_is_named_once_a_third_has_decided():
    pool, check = beside_each_other()
    pool.answer(2)
    pool.answer(1, WRONG)
    assert pool.audits.open
    assert pool.go_on(5, 2, 3) > 2
    assert pool.named == [1]


def test_the_version_waits_for_who_is_still_at_it():
    pool, _ = beside_each_other()
    pool.answer(1)
    while pool.task(3) is not None and not pool.task(3).is_check:
        pool.answer(3)
    assert pool.audits.open
    assert pool.go_on(3, 1, 2, 3) > 2


@pytest.mark.parametrize("leaver", [1, 2])
def test_who_leaves_while_two_are_at_it_is_no_trouble(leaver):
    pool, check = beside_each_other()
    if leaver == 1:
        pool.answer(2)
    pool.leave(leaver)
    stay = {1, 2, 3} - {leaver}
    assert check.block not in pool.audits.beside or pool.audits.beside[check.block].node in stay
    assert pool.go_on(5, *stay) > 2
    assert (pool.named, pool.ended) == ([], None)


def test_a_batch_that_fails_for_both_who_are_at_it_is_the_job():
    pool, check = beside_each_other()
    for node in (2, 1):
        pool.happens(WorkFailed(node, pool.task(node).lease, 0, "loss failed: boom", ""))
    assert "boom" in pool.ended.failure


@pytest.mark.parametrize("nodes", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["async", "local"])
def test_a_canary_that_nobody_can_compute_names_nobody(strategy, nodes):
    pool = Checked(*range(1, nodes + 1), strategy=strategy, is_open=False)
    for _ in range(100):
        if pool.ended is None:
            pool.go_on(0.1)
        for node in list(pool.given):
            if pool.ended is None and pool.task(node) is not None:
                pool.answer(node, problem=PROBLEM)
    assert pool.named == []
    assert PROBLEM in pool.ended.failure, "it is the job, as two of them say"


def test_who_cannot_compute_a_canary_where_another_one_can_is_not_believed():
    pool = Checked(1, 2, strategy="async")
    while pool.task(2) is None:
        pool.answer(1)
    pool.answer(2, problem=PROBLEM)
    pool.answer(1)
    assert pool.told == [(2, "faulty"), (2, "held")]


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_a_canary_in_which_the_users_code_fails_twice_ends_the_run(strategy):
    pool = Checked(1, 2, 3, strategy=strategy)
    for _ in range(2):
        pool.go_on(0.1)
        node = next(node for node in pool.given if pool.task(node) is not None)
        pool.happens(WorkFailed(node, pool.task(node).lease, 0, "loss failed: boom", ""))
    assert pool.ended.failure.startswith("step 0, batch 0")


def test_two_broken_nodes_that_find_nothing_finite_name_nobody():
    """Not a number is not a number: that two have the same one says nothing of who is right."""
    pool = Checked(1, 2, 3)
    pool.answer(1)
    for node in (2, 3):
        while not pool.task(node).is_check:
            pool.answer(node)
        pool.answer(node, digest=WRONG, problem=PROBLEM)
    assert pool.named == []
    assert PROBLEM in pool.ended.failure


def test_who_left_is_not_right_when_it_comes_back():
    pool = Checked(1, 2, 3)
    pool.answer(2)
    pool.leave(2)
    pool.go_on(1, 1, 3)
    assert pool.audits.verified.keys() == {1, 3}


def test_nothing_is_kept_of_who_has_left():
    pool = Checked(1)
    pool.go_on(1, 1)
    for node in range(2, 40):
        pool.join(node)
        for _ in range(20):
            pool.go_on(0.1, 1)
            if pool.task(node) is not None:
                pool.answer(node, node)
        pool.leave(node)
    assert pool.audits.verified.keys() <= {1}
    assert not pool.audits._told
