"""The tree: the same additions on the same operands, whoever computed what and whenever it came."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from wide.strategy.synchronous import OpenStep, lease_size
from wide.strategy.tree import Block, TreeSum, halves, kin


def in_words(block):
    """The sum over a block as the definition writes it."""
    if block.size == 1:
        return str(block.first)
    left, right = halves(block)
    return f"({in_words(left)}+{in_words(right)})"


def nodes_below(block):
    """Every node of the tree."""
    return {block} if block.size == 1 else {block}.union(*map(nodes_below, halves(block)))


def test_the_left_half_is_as_large_as_the_right_one_or_one_larger():
    assert halves(Block(0, 8)) == (Block(0, 4), Block(4, 8))
    assert halves(Block(0, 13)) == (Block(0, 7), Block(7, 13))
    assert halves(Block(7, 13)) == (Block(7, 10), Block(10, 13))
    assert halves(Block(10, 13)) == (Block(10, 12), Block(12, 13))


@given(st.integers(0, 1000), st.integers(2, 1000))
def test_halves_are_cut_at_half_the_length_rounded_up_wherever_a_block_begins(first, size):
    left, right = halves(Block(first, first + size))
    assert (left.first, right.end) == (first, first + size)
    assert left.end == right.first == first + math.ceil(size / 2)


def test_kin_are_parent_and_sibling():
    assert kin(Block(7, 10), Block(0, 13)) == (Block(7, 13), Block(10, 13))
    assert kin(Block(10, 13), Block(0, 13)) == (Block(7, 13), Block(7, 10))
    assert kin(Block(0, 7), Block(0, 13)) == (Block(0, 13), Block(7, 13))


@given(st.integers(2, 70))
def test_everybody_but_the_root_is_half_of_its_parent(total):
    root = Block(0, total)
    for block in nodes_below(root) - {root}:
        parent, sibling = kin(block, root)
        assert set(halves(parent)) == {block, sibling}


def test_a_lone_node_may_have_the_whole_step_whatever_its_size():
    opened = OpenStep(13)
    assert opened.cut(13) == Block(0, 13)
    assert not opened.free


def test_what_is_cut_is_a_node_of_the_tree():
    opened = OpenStep(13)
    assert [opened.cut(6) for _ in range(3)] == [Block(7, 13), Block(0, 4), Block(4, 7)]
    assert not opened.free


@given(st.integers(1, 70), st.lists(st.integers(1, 70), min_size=1))
def test_whatever_is_asked_for_a_lease_is_no_larger_and_a_node_of_the_tree(total, wishes):
    opened, tree = OpenStep(total), nodes_below(Block(0, total))
    for most in wishes:
        if opened.free:
            block = opened.cut(most)
            assert block in tree
            assert block.size <= most


def test_a_block_that_fits_is_taken_before_a_larger_one_is_split():
    opened = OpenStep(16)
    assert [opened.cut(4), opened.cut(6), opened.cut(8)] == [Block(0, 4), Block(4, 8), Block(8, 16)]


@given(st.integers(2, 100))
def test_two_equal_nodes_get_equal_shares_of_any_step(total):
    opened = OpenStep(total)
    sizes = [opened.cut(math.ceil(total / 2)).size for _ in range(2)]
    assert sorted(sizes) == [total // 2, math.ceil(total / 2)]
    assert not opened.free


@given(st.integers(1, 70), st.integers(0, 10**6))
def test_any_cutting_in_any_order_gives_the_sum_of_the_definition(total, seed):
    chance = random.Random(seed)
    opened, pieces = OpenStep(total), []
    while opened.free:
        pieces.append(opened.cut(chance.randrange(1, 70)))
    chance.shuffle(pieces)
    whole = TreeSum(Block(0, total), lambda a, b: f"({a}+{b})")
    for piece in pieces:
        inner = TreeSum(piece, lambda a, b: f"({a}+{b})")
        for i in range(*piece):
            inner.add(Block(i, i + 1), str(i))
        whole.add(piece, inner.take())
    assert whole.take() == in_words(Block(0, total))


@given(st.integers(1, 100), st.integers(0, 10**6))
def test_a_step_is_leased_and_merged_exactly_once_whatever_is_given_back(total, seed):
    chance = random.Random(seed)
    opened, out, merged = OpenStep(total), [], []
    while not opened.is_complete:
        if opened.free and chance.random() < 0.6:
            out.append(opened.cut(chance.randrange(1, 40)))
        elif out:
            block = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.3:
                opened.give_back(block)
            else:
                opened.accept(block)
                merged += range(*block)
        assert opened.free + opened.missing <= 2 * total
    assert sorted(merged) == list(range(total))


def test_a_lease_is_a_share_of_what_is_missing_and_shrinks():
    assert lease_size(left=40, share=0.1, free=40, takers=10) == 4
    assert lease_size(left=40, share=0.41, free=40, takers=1) == 19
    assert lease_size(left=6, share=0.41, free=6, takers=1) == 2
    assert lease_size(left=40, share=0.0, free=40, takers=1) == 1


def test_a_lease_leaves_something_for_every_idle_node():
    assert lease_size(left=10, share=0.5, free=10, takers=10) == 1
    assert lease_size(left=40, share=0.9, free=40, takers=10) == 4
