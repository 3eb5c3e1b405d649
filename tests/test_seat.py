"""Which core a node computes on, and when it may choose for itself."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest

from wide.coordinator.machines import TURN_S, Machines
from wide.node import seat
from wide.node.seat import Seat

linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="nobody can choose a core here")


@pytest.fixture
def cores():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is only one core")
    yield sorted(before)
    os.sched_setaffinity(0, before)


@linux
def test_a_place_is_a_core_until_it_is_left(cores):
    mine = Seat(threads=1)
    mine.take(1)
    assert os.sched_getaffinity(0) == {cores[1]}
    mine.take(0)
    assert os.sched_getaffinity(0) == {cores[0]}
    mine.leave()
    assert os.sched_getaffinity(0) == set(cores)
    mine.take(10**6)
    assert os.sched_getaffinity(0) == set(cores)


@linux
def test_who_computes_with_several_threads_has_all_cores(cores):
    Seat(threads=2).take(1)
    assert os.sched_getaffinity(0) == set(cores)


@linux
def test_who_may_use_fewer_cores_than_it_sees_has_all_of_them(cores, monkeypatch):
    monkeypatch.setattr(seat, "usable_cores", lambda: len(cores) - 1)
    Seat(threads=1).take(0)
    assert os.sched_getaffinity(0) == set(cores)


def machines(nodes, cores):
    found = Machines()
    for node in range(nodes):
        found.joined(node, "m", cores)
    return found


def test_where_there_are_more_cores_than_nodes_nobody_is_told_where_to_compute():
    assert [machines(3, 4).core_of(node, 0.0) for node in range(3)] == [-1, -1, -1]


def test_whose_turn_it_is_has_a_core_of_its_own():
    found = machines(5, 2)
    for turn in range(10):
        now = (turn + 0.5) * TURN_S
        at_work = [node for node in range(5) if found.has_turn(node, now)]
        assert sorted(found.core_of(node, now) for node in at_work) == [0, 1]


def test_turns_are_long_against_steps():
    found = machines(4, 2)
    found.steps_take(1.0)
    holders = [[node for node in range(4) if found.has_turn(node, 0.5 + second)] for second in range(40)]
    changes = sum(one != other for one, other in pairwise(holders))
    assert 2 <= changes <= 5
    found.steps_take(0.001)
    assert found.has_turn(0, 0.1) != found.has_turn(0, 0.1 + TURN_S)


def test_a_machine_of_its_own_has_no_cores_to_tell_apart():
    found = Machines()
    found.joined(1, "", 0)
    assert found.core_of(1, 0.0) == -1
