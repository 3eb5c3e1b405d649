"""Data that is read from its beginning to its end: once, in its order, and again from where a run was."""

from __future__ import annotations

import random

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.jobs import make
from wide.errors import TrainingFailed
from wide.job.samples import Samples
from wide.job.stream import ENDLESS, Stream


class Numbers(IterableDataset):
    """0, 1, 2, …, each with a random number; counts how often it was read."""

    def __init__(self, length=10, has_state=False):
        self.length, self.at, self.begin, self.read = length, 0, 0, 0
        if has_state:
            self.state_dict = lambda: {"at": self.at}
            self.load_state_dict = lambda state: setattr(self, "begin", state["at"])

    def __iter__(self):
        begin, self.begin = self.begin, 0
        for number in range(begin, self.length):
            self.at, self.read = number + 1, self.read + 1
            yield number, random.random() + float(torch.rand(()))


def numbers(samples):
    return [number for number, _ in samples]


def a_stream(data, length=ENDLESS, every=4):
    stream = Stream(data, seed=3)
    stream.use(length, every)
    return stream


def test_samples_are_read_once_and_kept_until_they_are_merged():
    data = Numbers()
    stream = a_stream(data)
    later, first = stream.fetch(4, 6), stream.fetch(0, 4)
    assert (numbers(first), numbers(later), data.read) == ([0, 1, 2, 3], [4, 5], 6)
    assert stream.fetch(0, 4) == first, "for somebody else, should the first one die"
    assert data.read == 6
    stream.forget(4)
    with pytest.raises(TrainingFailed, match="is gone"):
        stream.fetch(0, 1)
    assert numbers(stream.fetch(4, 5)) == [4]


def test_without_a_length_one_pass_follows_the_other():
    assert numbers(a_stream(Numbers(4)).fetch(0, 10)) == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]


def test_with_a_length_every_pass_has_to_keep_to_it():
    assert numbers(a_stream(Numbers(6), length=4).fetch(0, 8)) == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(TrainingFailed, match="ended after 3 samples of 4"):
        a_stream(Numbers(3), length=4).fetch(0, 4)


def test_random_numbers_follow_from_a_samples_number_however_far_ahead_it_is_read():
    ahead, bit_by_bit = a_stream(Numbers()).fetch(0, 20), a_stream(Numbers())
    random.seed(1)
    assert [bit_by_bit.fetch(i, i + 1)[0] for i in range(20)] == ahead
    assert ahead[0] != ahead[10], "but they are others in the next pass"


@pytest.mark.parametrize("at", [0, 4, 8, 12, 16])
@pytest.mark.parametrize("length", [10, ENDLESS])
def test_a_run_goes_on_with_the_next_sample(at, length):
    expected = a_stream(Numbers(), length).fetch(0, 24)[at:]
    for has_state in (False, True):
        data = Numbers(has_state=has_state)
        before, after = a_stream(data, length), Numbers(has_state=has_state)
        before.fetch(0, at + 3)
        state, resumed = before.state(at), a_stream(after, length)
        again = resumed.go_on_from(at, state)
        assert resumed.fetch(at, 24) == expected
        # It is read again from its beginning if it has no state; a step's own place in a pass is known.
        if not has_state:
            assert again == at
        elif length == ENDLESS:
            assert again == 0


class Counting(Numbers):
    """Another order in every pass, by a counter of its own, which is part of its state."""

    def __init__(self, length=10):
        super().__init__(length)
        self.passes, self.is_over = 0, False

    def state_dict(self):
        return {"at": self.at, "passes": self.passes, "is_over": self.is_over}

    def load_state_dict(self, state):
        self.begin, self.passes, self.is_over = state["at"], state["passes"], state["is_over"]

    def __iter__(self):
        begin, self.begin = self.begin, 0
        if self.is_over and begin == self.length:
            return  # it was told that it had ended
        self.is_over = False
        for number in range(begin, self.length):
            self.at = number + 1
            yield (number * 7 + self.passes) % 10, random.random()
        self.passes, self.is_over = self.passes + 1, True


@pytest.mark.parametrize("length", [8, 10])
@pytest.mark.parametrize("at", [4, 8, 10, 12, 16, 20])
def test_a_data_set_that_counts_its_passes_goes_on_with_the_right_one(at, length):
    expected = a_stream(Counting(length), length).fetch(0, 30)[at:]
    before, resumed = a_stream(Counting(length), length), a_stream(Counting(length), length)
    before.fetch(0, at)
    resumed.go_on_from(at, before.state(at))
    assert resumed.fetch(at, 30) == expected


def test_how_long_it_is_can_be_read():
    assert Stream(Numbers(7), 0).count() == 7

    class Sized(Numbers):
        def __len__(self):
            return 70

    data = Sized(7)
    assert Stream(data, 0).count() == 70
    assert data.read == 0


def test_what_can_be_read_only_once_says_so():
    stream = a_stream(iter([1, 2, 3]))
    assert stream.fetch(0, 3) == [1, 2, 3]
    with pytest.raises(TrainingFailed, match="gave no sample in pass 2: can it be read only once"):
        stream.fetch(3, 4)
    with pytest.raises(TrainingFailed, match="gave no sample in pass 1"):
        a_stream([]).fetch(0, 1)


def test_what_it_raises_is_told_with_the_samples_number():
    def broken():
        yield 1
        raise OSError("the network is down")

    with pytest.raises(TrainingFailed, match="the data set failed at sample 1: OSError: the network is down"):
        a_stream(broken()).fetch(0, 2)


def test_a_stream_that_has_failed_does_not_look_as_if_it_had_ended():
    def broken():
        yield 1
        raise OSError("once")

    stream = a_stream(broken())
    for _ in range(2):
        with pytest.raises(TrainingFailed, match="sample 1: OSError: once"):
            stream.fetch(0, 2)


def test_samples_that_change_their_shape_cannot_be_one_batch():
    def growing():
        for i in range(4):
            yield torch.zeros(1 + i // 2)

    samples = Samples(make(dataset=growing), 0)
    samples.measure(False, 4)
    assert samples.batch(torch.arange(2), 0).shape == (2, 1)
    with pytest.raises(TrainingFailed, match="samples of a batch must have the same shapes"):
        samples.batch(torch.arange(1, 3), 0)


def test_a_stream_has_no_other_order():
    with pytest.raises(TrainingFailed, match="read as it comes: leave out order"):
        Samples(make(dataset=Numbers, order=lambda epoch, generator: [0]), 0)
