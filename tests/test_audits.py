"""What is computed a second time, and what follows from two answers that differ: facts about the pure part."""

from __future__ import annotations

import pytest

from wide.coordinator.audits import AGAIN_S, Audits
from wide.coordinator.leases import Lease
from wide.strategy.tree import Block

NEVER, ALWAYS = (lambda: 1.0), (lambda: 0.0)
BLOCK = Block(0, 1)
RIGHT, WRONG = 1, 2


def lease(node: int, number: int = 1, granted_at: float = 0.0) -> Lease:
    return Lease(number, node, BLOCK, 0, 0, granted_at, 0)


def merged(audits: Audits, node: int, digest: int, others: set[int], now: float = 0.0, doubt: str = "") -> bool:
    it = lease(node, granted_at=now)
    audits.given(it)
    is_due = audits.merge(it, BLOCK, doubt, now)
    return is_due and audits.begin(it, BLOCK, digest, others | {node}, now) is not None


def says(audits: Audits, node: int, digest: int, members: set[int], now: float = 0.0):
    """This node is asked, and answers."""
    assert audits.next_for(node, members, lambda held: False) == BLOCK
    asked = lease(node, 100 + node)
    audits.granted(asked)
    return audits.answered(asked, digest, members, now)


def test_a_node_that_is_new_is_checked_and_then_only_by_chance():
    audits = Audits(0.02, NEVER)
    assert merged(audits, 1, RIGHT, {2})
    assert says(audits, 2, RIGHT, {1, 2}).confirmed == (1, 2)
    assert audits.verified.keys() == {1, 2}
    assert not audits.open
    assert not merged(audits, 1, RIGHT, {2})
    assert not merged(audits, 2, RIGHT, {1})
    assert merged(audits, 1, RIGHT, {2}, now=10 * AGAIN_S), "after a while it is checked again"


def test_by_chance_or_because_of_a_doubt():
    audits = Audits(0.02, ALWAYS)
    audits.verified[1] = 0.0
    assert merged(audits, 1, RIGHT, {2})
    audits = Audits(0.0, NEVER)
    audits.verified[1] = 0.0
    assert merged(audits, 1, RIGHT, {2}, doubt="its norm is 1e9")


def test_alone_nobody_can_check_it():
    audits = Audits(1.0, ALWAYS)
    assert not merged(audits, 1, RIGHT, set())
    assert not audits.open


@pytest.mark.parametrize(("first", "second", "third", "wrong"), [(RIGHT, WRONG, RIGHT, 2), (WRONG, RIGHT, RIGHT, 1)])
def test_a_third_decides(first: int, second: int, third: int, wrong: int):
    audits, members = Audits(0.0, NEVER), {1, 2, 3}
    merged(audits, 1, first, {2, 3})
    assert says(audits, 2, second, members) == (None, frozenset(), frozenset())
    assert audits.open
    assert audits.next_for(1, members, lambda held: False) is None, "there is a third one"
    outcome = says(audits, 3, third, members)
    assert outcome.wrong == {wrong}
    assert (outcome.confirmed is not None) == (wrong == 2)
    assert not audits.open


def test_of_two_who_contradicts_itself_is_wrong():
    audits, members = Audits(0.0, NEVER), {1, 2}
    merged(audits, 1, WRONG, {2})
    says(audits, 2, RIGHT, members)
    assert says(audits, 1, RIGHT, members).wrong == {1}


def test_of_two_who_insist_nobody_can_tell_and_a_third_is_waited_for():
    audits, members = Audits(0.0, NEVER), {1, 2}
    merged(audits, 1, WRONG, {2})
    says(audits, 2, RIGHT, members)
    says(audits, 1, WRONG, members)
    assert says(audits, 2, RIGHT, members).undecided == {1, 2}
    assert audits.hold({1, 2}) == {1, 2}
    audits.version_done()
    assert merged(audits, 3, RIGHT, {1, 2})
    assert says(audits, 2, RIGHT, {1, 2, 3}).confirmed == (3, 2)
    assert not audits.held, "and all of them are looked at once more"
    assert 1 not in audits.verified


def test_two_who_insist_are_not_asked_about_each_other_again():
    audits = Audits(1.0, ALWAYS)
    audits.verified[1] = 0.0
    assert audits.hold({1, 2}) == {2}
    assert audits.hold({1, 2}) == set(), "it is said once"
    assert audits.held == {2}
    assert not merged(audits, 1, RIGHT, {2}, now=10 * AGAIN_S, doubt="its norm is 1e9")
    assert merged(audits, 1, RIGHT, {2, 3}, now=10 * AGAIN_S)


def test_who_was_right_before_goes_on_and_the_other_waits():
    audits = Audits(0.0, NEVER)
    audits.verified[1] = 0.0
    assert audits.hold({1, 2}) == {2}


def test_a_job_that_nobody_computes_alike_is_nobodys_fault():
    audits, members = Audits(0.0, NEVER), {1, 2}
    merged(audits, 1, 1, {2})
    says(audits, 2, 2, members)
    says(audits, 1, 3, members)
    assert says(audits, 2, 4, members).undecided == {1, 2}


def test_who_leaves_in_between_is_not_waited_for():
    audits = Audits(0.0, NEVER)
    merged(audits, 1, RIGHT, {2})
    audits.granted(asked := lease(2, 5))
    audits.left(2)
    assert not audits.answered(asked, WRONG, {1}, 0.0).wrong, "its answer says nothing any more"
    assert [audit.block for audit in audits.given_up({1}, {1})] == [BLOCK]
    assert not audits.open


def test_a_lost_check_is_given_to_somebody_else():
    audits, members = Audits(0.0, NEVER), {1, 2, 3}
    merged(audits, 1, RIGHT, {2, 3})
    audits.granted(lease(2, 5))
    assert audits.next_for(3, members, lambda held: False) is None
    assert audits.next_for(3, members, lambda held: True) == BLOCK
