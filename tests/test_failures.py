"""Who failed at which batch: facts about the pure part."""

from __future__ import annotations

from wide.coordinator.failures import Failures
from wide.strategy.tree import Block


def test_two_that_fail_at_the_same_batch_agree_and_one_alone_does_not():
    failures = Failures()
    assert not failures.agree(5, "1", 1)
    assert not failures.agree(5, "1", 1), "however often"
    assert not failures.agree(6, "2", 2)
    assert failures.agree(5, "2", 2)


def test_whoever_has_no_trouble_there_says_that_it_was_not_the_job():
    failures = Failures()
    failures.agree(5, "1", 1)
    failures.agree(9, "1", 1)
    assert failures.managed(Block(4, 8), "1") == []
    assert failures.managed(Block(4, 8), "2") == [(5, 1)]
    assert not failures.agree(5, "3", 3)
    assert failures.agree(9, "3", 3)


def test_with_a_step_all_is_forgotten():
    failures = Failures()
    failures.agree(5, "1", 1)
    failures.step_closed()
    assert not failures.agree(5, "2", 2)


def test_whoever_comes_back_under_another_number_is_not_another_one():
    failures = Failures()
    assert not failures.agree(5, "m1", 1)
    assert not failures.agree(5, "m1", 2)
    assert failures.managed(Block(4, 8), "m1") == []
    assert failures.agree(5, "m2", 3)
