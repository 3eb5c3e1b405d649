"""The book of leases, with the policies that it tells what comes back: nothing is lost, and nothing given back twice."""

from __future__ import annotations

import itertools
import random

import pytest

from wide.coordinator.leases import Lease, Leases
from wide.job.schedule import Schedule
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.description import Stage
from wide.strategy.policy import Share
from wide.strategy.tree import Block

STEPS, BATCHES = 5, 8
LINES = ("async", "local")  # where what was given back may still be answered
KNOWN, NEWCOMER = Share(1.0, 1, 10.0), Share(1.0)


class Book(Leases):
    """The leases of a run, and how one is made."""

    def __init__(self, strategy):
        schedule = Schedule(1000, 1, BATCHES, seed=0)
        super().__init__(STRATEGIES[strategy].policy(Stage(schedule, 0, STEPS)))
        self._numbers = itertools.count(1)
        for node in (1, 2, 3):
            self.welcome(node)

    def cut(self, node, share=KNOWN):
        """A node is given what it asks for."""
        return self.give(node, self.policy.cut(share, lambda: 0.0, 0.0).block)

    def give(self, node, block):
        lease = Lease(next(self._numbers), node, block, 0, 0, 0.0, 0)
        self.grant(lease)
        return lease

    def hand_in(self, lease):
        """Does its result count?"""
        is_wanted = self.claim(lease)
        self.answered(lease)
        if is_wanted:
            self.merge(lease.block)
            self.policy.accept(lease.node, lease.block, 0.0)
        return is_wanted


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("order", [(1, 2), (2, 1)], ids=["the first holder goes first", "the second goes first"])
def test_a_block_that_two_nodes_hold_survives_the_farewell_of_either(strategy, order):
    book = Book(strategy)
    free = book.policy.free
    block = book.cut(1).block
    book.give(2, block)
    book.farewell(order[0])
    assert (block in book.out, book.policy.free) == (True, free - block.size)
    assert [lease.node for lease in book.out[block]] == [order[1]]
    book.farewell(order[1])
    assert (book.out, book.policy.free) == ({}, free)


@pytest.mark.parametrize("strategy", LINES)
def test_an_expired_lease_counts_if_its_block_was_not_granted_again(strategy):
    book = Book(strategy)
    free = book.policy.free
    lease = book.cut(1)
    book.expire(lease)
    assert (lease.is_expired, book.out, book.policy.free) == (True, {}, free)
    assert book.claim(lease)
    assert (book.out, book.policy.free) == ({lease.block: [lease]}, free - lease.block.size)


@pytest.mark.parametrize("strategy", LINES)
def test_an_expired_lease_counts_if_its_block_was_granted_again_as_it_is_and_nobody_was_quicker(strategy):
    book = Book(strategy)
    lease = book.cut(1)
    book.expire(lease)
    again = book.cut(2)
    assert again.block == lease.block
    assert book.hand_in(lease)
    assert not book.hand_in(again), "the first result was merged"


@pytest.mark.parametrize("strategy", LINES)
def test_an_expired_lease_does_not_count_if_its_block_was_granted_again_in_other_pieces(strategy):
    book = Book(strategy)
    lease = book.cut(1)
    book.expire(lease)
    piece = book.cut(2, NEWCOMER)
    assert piece.block == Block(lease.block.first, lease.block.first + 1) != lease.block
    assert not book.claim(lease)
    assert book.hand_in(piece)
    assert not book.claim(lease), "a part of it is merged"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_of_what_was_computed_in_part_the_rest_is_free_again(strategy):
    book = Book(strategy)
    free = book.policy.free
    lease = book.cut(1)
    kept = book.keep_first(lease, 2)
    assert kept == Block(lease.block.first, lease.block.first + 2)
    assert book.out == {kept: [lease]}
    assert book.policy.free == free - 2
    rest = set()
    while book.policy.free > free - lease.block.size:
        rest |= set(range(*book.cut(2, NEWCOMER).block))
    assert rest == set(range(kept.end, lease.block.end)), "and goes to others before anything else"


@pytest.mark.parametrize(("strategy", "batches"), [("sync", 3), *itertools.product(STRATEGIES, (0, -1, 99))])
def test_of_what_cannot_be_used_in_part_all_is_free_again(strategy, batches):
    book = Book(strategy)
    free = book.policy.free
    assert book.keep_first(book.cut(1), batches) is None
    assert (book.out, book.policy.free) == ({}, free)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_part_of_what_somebody_else_computes_as_a_whole_is_left_to_that_one(strategy):
    book = Book(strategy)
    lease = book.cut(1)
    other, free = book.give(2, lease.block), book.policy.free
    assert book.keep_first(lease, 2) is None
    assert (book.out, book.policy.free) == ({other.block: [other]}, free)
    assert book.hand_in(other)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_given_back_once_is_not_given_back_again(strategy):
    book = Book(strategy)
    free = book.policy.free
    lease = book.cut(1)
    book.expire(lease)
    book.expire(lease)
    book.farewell(1)
    assert book.policy.free == free


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_is_merged_does_not_come_back_with_whoever_came_too_late(strategy):
    book = Book(strategy)
    lease = book.cut(1)
    late, free = book.give(2, lease.block), book.policy.free
    assert book.hand_in(lease)
    book.expire(late)
    book.farewell(2)
    assert (book.out, book.policy.free) == ({}, free)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_every_batch_is_free_or_out_or_merged(strategy, seed):
    chance, book, merged = random.Random(seed), Book(strategy), []
    total = book.policy.free
    while len(merged) < total:
        held = [lease for leases in book.by_node.values() for lease in leases.values()]
        fate, node = chance.random(), chance.choice(list(book.by_node))
        if fate < 0.4 and book.policy.free:
            book.cut(node, chance.choice((KNOWN, NEWCOMER)))
        elif fate < 0.5 and book.out:
            book.give(node, chance.choice(list(book.out)))
        elif fate < 0.6 and held:
            book.expire(chance.choice(held))
        elif fate < 0.65:
            book.farewell(node)
            book.welcome(node)
        elif fate < 0.75 and held:
            lease = chance.choice(held)
            if book.claim(lease) and lease.block.size > 1:
                book.answered(lease)
                if kept := book.keep_first(lease, chance.randrange(1, lease.block.size)):
                    book.merge(kept)
                    book.policy.accept(lease.node, kept, 0.0)
                    merged += range(*kept)
        elif held:
            lease = chance.choice(held)
            merged += range(*lease.block) if book.hand_in(lease) else ()
        out = [at for block in book.out for at in range(*block)]
        assert len(set(out)) == len(out), "no batch is out in two ways"
        assert not set(out) & set(merged)
        assert book.policy.free + len(out) + len(merged) == total
    assert sorted(merged) == list(range(total))
