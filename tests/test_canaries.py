"""Which nodes may work where bits cannot tell: facts about the pure part."""

from __future__ import annotations

import pytest
import torch

from tests.jobs import make, mlp
from wide.coordinator.canaries import AGAIN_S, MOST_PAIRS, MOST_STRIKES, Canaries
from wide.coordinator.leases import Lease
from wide.job.here import Here
from wide.job.samples import Samples
from wide.node.fused import Fused
from wide.node.trainer import Place, Trainer
from wide.node.training import TRAININGS
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.tree import Block

NEAR, FAR = 0.5, 900.0
BLOCK = Block(0, 1)


def canaries(strategy: str = "async", is_lossless: bool = True) -> Canaries:
    made = Canaries(is_lossless)
    made.follow(STRATEGIES[strategy])
    return made


def compare(them: Canaries, one: int, other: int, distance: float, members: set[int], now: float = 0.0):
    pair = them.begin(one, other)
    pair.out += [Lease(i, node, BLOCK, 0, 0, 0.0, 0, is_check=True) for i, node in enumerate((one, other))]
    assert them.answered(pair.number, one, None, False, members, now) is None
    assert them.is_open(pair.number)
    return them.answered(pair.number, other, distance, False, members, now)


def test_a_newcomer_has_to_pass_if_there_is_another_one():
    them = canaries()
    assert not them.has_to_pass(1, {1}, 0.1, 0.0)
    assert them.has_to_pass(1, {1, 2}, 0.1, 0.0)
    compare(them, 1, 2, NEAR, {1, 2})
    assert not them.has_to_pass(1, {1, 2}, 0.1, 1.0)
    assert them.has_to_pass(1, {1, 2}, 0.1, 2 * AGAIN_S), "now and then again"
    assert not them.has_to_pass(1, {1, 2}, 10.0, 2 * AGAIN_S), "but not where a batch takes that long"


def test_where_bits_tell_nobody_is_compared_like_this():
    them = canaries("sync")
    assert not them.has_to_pass(1, {1, 2}, 0.1, 0.0)


@pytest.mark.parametrize("strategy", ["async", "local"])
def test_nor_where_what_nodes_have_was_rounded_on_its_way(strategy):
    them = canaries(strategy, is_lossless=False)
    assert not them.has_to_pass(1, {1, 2}, 0.1, 0.0)


def test_who_differs_from_two_that_have_passed_is_wrong():
    them, members = canaries(), {1, 2, 3}
    compare(them, 1, 2, NEAR, members)
    assert not compare(them, 3, 1, FAR, members).wrong
    assert compare(them, 3, 2, FAR, members).wrong == {3}


def test_also_if_they_have_passed_only_afterwards():
    them, members = canaries(), {1, 2, 3}
    assert not compare(them, 3, 1, FAR, members).wrong
    assert not compare(them, 3, 2, FAR, members).wrong
    assert compare(them, 1, 2, NEAR, members).wrong == {3}


def test_two_liars_who_differ_from_everybody_prove_nothing():
    them, members = canaries(), {1, 2, 3}
    assert not compare(them, 1, 2, FAR, members).wrong
    assert not compare(them, 1, 3, FAR, members).wrong


def test_of_two_alone_the_one_that_came_later_waits():
    them = canaries()
    assert compare(them, 1, 2, FAR, {1, 2}).held == {2}
    assert not them.has_to_pass(1, {1, 2}, 0.1, 0.0)
    them.wait(2)
    assert not them.is_wanted(1, {1, 2}), "they have met"
    assert them.is_wanted(3, {1, 2, 3})


def strike(them: Canaries, node: int, at: int, other: int = 2) -> int:
    """Its update is doubted, and another one finds nothing odd there."""
    block = Block(at, at + 1)
    assert them.refuses(node, block, {node, other})
    return them.merged(other, block)


def test_doubts_that_another_one_does_not_share_lead_to_quarantine_and_a_comparison_out_of_it():
    them = canaries()
    assert [strike(them, 1, at) for at in range(MOST_STRIKES)] == [0] * (MOST_STRIKES - 1) + [1]
    assert them.quarantined == {1}
    assert them.has_to_pass(1, {1, 2}, 0.1, 0.0)
    assert compare(them, 1, 2, NEAR, {1, 2}).cleared == {1}
    assert not strike(them, 1, 99), "it begins anew"


def test_doubts_that_nobody_has_looked_at_are_nobodys_fault():
    them = canaries()
    for at in range(10 * MOST_STRIKES):
        assert them.refuses(1, Block(at, at + 1), {1, 2})
    assert not them.quarantined


def test_all_that_was_doubted_at_once_is_one_strike():
    them = canaries()
    for at in range(10):
        assert them.refuses(1, Block(at, at + 1), {1, 2})
    for at in range(10):
        assert not them.merged(2, Block(at, at + 1))
    assert not strike(them, 1, 20)
    assert strike(them, 1, 21) == 1


def test_what_two_nodes_find_odd_is_the_job():
    them, members = canaries(), {1, 2, 3}
    for at in range(0, 100, 2):
        assert them.refuses(1, Block(at, at + 1), members)
        assert not them.refuses(2, Block(at + 1, at + 2), members)
        assert not them.refuses(3, Block(at, at + 1), members)
        assert not them.refuses(1, Block(at + 1, at + 2), members), "from then on also for the first one"
        assert not them.merged(2, Block(at, at + 1))
    assert not them.quarantined


def test_who_is_doubted_waits_for_another_one_who_could_tell():
    them = canaries()
    assert not them.has_to_wait(1, {1, 2})
    assert them.refuses(1, BLOCK, {1, 2})
    assert them.has_to_wait(1, {1, 2})
    assert not them.has_to_wait(2, {1, 2})
    assert not them.has_to_wait(1, {1}), "there is nobody"
    them.merged(2, BLOCK)
    assert not them.has_to_wait(1, {1, 2})


def test_a_part_of_what_was_doubted_says_nothing_about_the_rest():
    them = canaries()
    for at in range(0, 4 * MOST_STRIKES, 4):
        assert not them.quarantined
        assert them.refuses(1, Block(at, at + 4), {1, 2, 3})
        assert not them.merged(2, Block(at, at + 1))
        assert them.has_to_wait(1, {1, 2, 3})
        them.merged(3, Block(at + 1, at + 4))
    assert them.quarantined == {1}


def test_who_did_it_again_itself_has_shown_nothing():
    them = canaries()
    for at in range(10):
        assert them.refuses(1, Block(at, at + 1), {1, 2})
        assert not them.merged(1, Block(at, at + 1))
    assert not them.quarantined


def test_doubts_about_who_has_left_excuse_nobody():
    them = canaries()
    assert them.refuses(1, BLOCK, {1, 2})
    them.left(1)
    assert them.refuses(2, Block(5, 6), {2, 3})


def test_who_is_the_only_one_that_could_work_is_believed():
    them = canaries()
    assert not them.refuses(1, BLOCK, {1})
    compare(them, 1, 2, FAR, {1, 2})
    assert not them.refuses(1, BLOCK, {1, 2}), "the other one is held"


def test_who_is_held_or_gone_is_no_reason_to_be_compared_again():
    them = canaries()
    compare(them, 1, 2, FAR, {1, 2})
    assert not them.has_to_pass(1, {1, 2}, 0.1, 2 * AGAIN_S)
    assert them.has_to_pass(1, {1, 2, 3}, 0.1, 2 * AGAIN_S)
    assert them.has_to_pass(2, {1, 2}, 0.1, 2 * AGAIN_S), "and it still waits"
    them.left(1)
    assert them.has_to_pass(1, {1, 2}, 0.1, 2 * AGAIN_S)
    them.wait(2)
    assert them.is_wanted(1, {1, 2}), "who comes again is looked at anew"


def test_an_answer_of_a_pair_that_is_no_more_says_nothing():
    them, members = canaries(), {1, 2, 3}
    pair = them.begin(1, 2)
    them.left(2)
    assert them.answered(pair.number, 1, None, False, members, 0.0) is None
    assert not them.is_open(pair.number)


def test_who_has_answered_waits_for_the_other_one_and_not_for_ever():
    them = canaries()
    pair = them.begin(1, 2)
    lease = Lease(1, 2, BLOCK, 0, 0, 0.0, 0, is_check=True)
    pair.out.append(lease)
    assert them.awaits(1, lambda it: False)
    assert not them.awaits(1, lambda it: it is lease)
    assert not them.awaits(3, lambda it: False)


def test_there_are_so_many_pairs_and_no_more_but_for_one_that_may_never_answer():
    them = canaries()
    pairs = [them.begin(2 * i + 1, 2 * i + 2) for i in range(MOST_PAIRS)]
    leases = [Lease(i, pair.nodes[0], BLOCK, 0, 0, 0.0, 0, is_check=True) for i, pair in enumerate(pairs)]
    for pair, lease in zip(pairs, leases, strict=True):
        pair.out.append(lease)
    assert not them.has_room(lambda it: False)
    assert them.has_room(lambda it: it is leases[2])
    assert [them.is_open(pair.number) for pair in pairs] == [True, True, False, True]


def test_a_gradient_that_is_compared_follows_from_the_pools_weights_and_not_from_own_steps():
    job = make(model=mlp)
    batch = Samples(job, 0).batch(torch.arange(4), 0, Here(0, 0, 0, None))
    places, go_on = [Place(0, 0, 4, 1.0)], lambda done, of: True
    gradients = []
    for has_moved in (False, True):
        trainer = Trainer(job, 0, torch.device("cpu"))
        trainer.keep_versions()
        own, exact = (TRAININGS[name](job, trainer, Fused(trainer)) for name in ("local", "sync"))
        if has_moved:
            own.begin()
            own.train(places, lambda i: batch, 1, go_on)
            own.result()
        exact.begin()
        exact.train(places, lambda i: batch, 0, go_on)
        gradients.append(exact.result().raw.clone())
    assert torch.equal(*gradients)
