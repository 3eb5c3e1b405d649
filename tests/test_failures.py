"""Who failed at which batch: facts about the pure part."""

from __future__ import annotations

from wide.coordinator.failures import Failures
from wide.strategy.tree import Block


def test_two_that_fail_at_the_same_batch_agree_and_one_alone_does_not():
    failures = Failures()
    assert not failures.agree(5, node=1)
    assert not failures.agree(5, node=1), "however often"
    assert not failures.agree(6, node=2)
    assert failures.agree(5, node=2)


def test_whoever_has_no_trouble_there_says_that_it_was_not_the_job():
    failures = Failures()
    failures.agree(5, node=1)
    failures.agree(9, node=1)
    assert failures.managed(Block(4, 8), node=1) == []
    assert failures.managed(Block(4, 8), node=2) == [(5, 1)]
    assert not failures.agree(5, node=3)
    assert failures.agree(9, node=3)


def test_with_a_step_all_is_forgotten():
    failures = Failures()
    failures.agree(5, node=1)
    failures.step_closed()
    assert not failures.agree(5, node=2)
