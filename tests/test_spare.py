"""Buffers for updates: used again, let go of when fewer are needed, and never in two hands."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch import nn

from wide.codec.layout import Layout
from wide.codec.spare import LEAST_KEPT, Spare


@pytest.fixture
def spare():
    return Spare(Layout(nn.Linear(600, 300)))


def test_there_is_room_for_one_update_in_each(spare):
    layout = Layout(nn.Linear(600, 300))
    assert spare.take().raw.numel() == layout.live_nbytes


def test_memory_that_was_given_back_is_used_again(spare):
    flat = spare.take()
    spare.give(flat)
    assert spare.take() is flat


def test_nobody_is_given_what_another_one_has(spare):
    flats = [spare.take() for _ in range(5)]
    assert len({flat.raw.data_ptr() for flat in flats}) == 5
    for flat in flats:
        spare.give(flat)
    again = [spare.take() for _ in range(5)]
    assert len({flat.raw.data_ptr() for flat in again}) == 5


def test_it_knows_how_many_are_in_use(spare):
    flats = [spare.take() for _ in range(5)]
    assert spare.in_use == 5
    for flat in flats[:3]:
        spare.give(flat)
    assert spare.in_use == 2
    spare.take()
    assert spare.in_use == 3


def alive(flats):
    """How many of them still have memory, if nobody else knows them."""
    known = [weakref.ref(flat) for flat in flats]
    flats.clear()
    gc.collect()
    return sum(ref() is not None for ref in known)


@pytest.mark.parametrize("most", [4, 6])
def test_beyond_what_is_to_be_kept_memory_goes_back_to_the_system(spare, most):
    spare.keep(most)
    flats = [spare.take() for _ in range(8)]
    for flat in flats:
        spare.give(flat)
    del flat
    assert alive(flats) == most


def test_when_fewer_are_needed_what_lies_about_goes_back_too(spare):
    spare.keep(6)
    flats = [spare.take() for _ in range(6)]
    for flat in flats:
        spare.give(flat)
    del flat
    spare.keep(3)
    assert alive(flats) == 3


def test_a_few_are_always_kept(spare):
    spare.keep(0)
    flats = [spare.take() for _ in range(5)]
    for flat in flats:
        spare.give(flat)
    del flat
    assert alive(flats) == LEAST_KEPT > 0


@pytest.mark.parametrize("taken", [1, 9], ids=["kept", "let go of"])
def test_whoever_gives_a_buffer_back_twice_is_told_so(spare, taken):
    flats = [spare.take() for _ in range(taken)]
    for flat in flats:
        spare.give(flat)
    with pytest.raises(RuntimeError, match="given back twice"):
        spare.give(flats[-1])
    assert spare.in_use == 0


def test_what_was_taken_again_may_be_given_back_again(spare):
    for _ in range(3):
        spare.give(spare.take())
    assert spare.in_use == 0


def test_small_ones_are_kept_however_few_are_needed():
    spare = Spare(Layout(nn.Linear(6, 3)))
    spare.keep(1)
    flats = [spare.take() for _ in range(20)]
    for flat in flats:
        spare.give(flat)
    assert alive(flats) == 20
