"""In which order samples come, and how an epoch is cut into batches and steps."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

import wide
from tests.jobs import make
from wide.errors import TrainingFailed, UsageError
from wide.job.samples import Samples
from wide.job.schedule import Schedule

COUNTER = itertools.count()


def of(schedule, epochs=1):
    """The ids of each batch of each step."""
    steps = [schedule.step(number) for number in range(schedule.steps_for(epochs))]
    return [[schedule.ids(step, i, i + 1).tolist() for i in range(step.batches)] for step in steps]


def ids_of(schedule, epochs=1):
    return [i for step in of(schedule, epochs) for batch in step for i in batch]


@pytest.mark.parametrize(
    ("samples", "batch_size", "per_step", "order"),
    [
        (100, 32, 2, None),
        (100, 32, None, None),
        (100, 7, None, None),
        (101, 100, None, None),
        (5, 32, None, None),
        (30, 4, 3, lambda epoch, generator: torch.randperm(30, generator=generator).split(3 + epoch)),
        (30, 4, None, lambda epoch, generator: torch.randperm(30, generator=generator).split(11 + epoch)),
        (30, 4, 2, lambda epoch, generator: range(17)),
    ],
)
def test_positions_steps_and_sizes_agree(samples, batch_size, per_step, order):
    schedule, position = Schedule(samples, batch_size, per_step, 3, order), 0
    for number in range(schedule.steps_for(3)):
        step = schedule.step(number)
        assert schedule.position(number) == position
        assert sum(schedule.sizes(step, 0, step.batches)) == step.samples
        for batch in range(step.batches):
            assert schedule.step_at(position + batch) == step
            ids = schedule.ids(step, batch, batch + 1)
            assert [len(ids)] == schedule.sizes(step, batch, batch + 1)
            assert bytes(schedule.ids_as_bytes(step, batch, batch + 1)) == ids.numpy().tobytes()
        position += step.batches
    assert step.is_last_of_epoch
    stretches = schedule.stretches(0, position)
    assert [stretch.step.number for stretch in stretches] == list(range(schedule.steps_for(3)))


def test_what_one_update_sees_is_cut_into_eight_batches_or_fewer_of_two_samples_at_least():
    assert [[len(batch) for batch in step] for step in of(Schedule(70, 32, None, 0))] == [[4] * 8, [4] * 8, [2] * 3]
    assert [len(batch) for batch in of(Schedule(100, 100, None, 0))[0]] == [13] * 4 + [12] * 4
    assert [[len(batch) for batch in step] for step in of(Schedule(7, 5, None, 0))] == [[3, 2], [2]]


def test_a_job_that_leaves_out_batches_per_step_says_what_one_update_sees():
    job = make(batch_size=32, batches_per_step=None)
    assert Schedule(64, job.batch_size, job.batches_per_step, 0).step(0).samples == 32


def test_shuffled_is_another_order_every_epoch_and_each_sample_once():
    one, two = ids_of(Schedule(50, 8, 2, 1)), ids_of(Schedule(50, 8, 2, 1), 2)[50:]
    assert sorted(one) == sorted(two) == list(range(50))
    assert one != two
    assert ids_of(Schedule(50, 8, 2, 2)) != one


def test_sequential_is_as_the_data_lies():
    assert ids_of(Schedule(20, 8, 2, 1, wide.order.sequential()), 2) == [*range(20), *range(20)]


def test_weighted_draws_what_weighs_more_more_often():
    drawn = ids_of(Schedule(4, 8, 2, 1, wide.order.weighted([0.0, 1.0, 1.0, 8.0], count=2000)))
    assert len(drawn) == 2000
    counts = [drawn.count(i) for i in range(4)]
    assert counts[0] == 0
    assert 1500 < counts[3] < 1700
    once = ids_of(Schedule(4, 8, 2, 1, wide.order.weighted([1.0, 1.0, 0.0, 1.0], count=3, replacement=False)))
    assert sorted(once) == [0, 1, 3]


def test_by_length_puts_together_what_is_about_equally_long():
    lengths = torch.randint(1, 1000, (405,), generator=torch.Generator().manual_seed(1))
    schedule = Schedule(405, 8, 4, 1, wide.order.by_length(lengths))
    batches = [batch for step in of(schedule) for batch in step]
    assert sorted(itertools.chain.from_iterable(batches)) == list(range(405))
    padded = sum(int(lengths[batch].max()) * len(batch) for batch in batches) / int(lengths.sum())
    assert padded < 1.1
    longest = [int(lengths[batch].max()) for batch in batches[:-1]]
    assert longest != sorted(longest), "but not the short ones first"
    assert len(batches[-1]) == 5, "the short batch comes last"


def test_blocks_are_runs_of_neighbours():
    ids = ids_of(Schedule(20, 4, 2, 1, wide.order.blocks(4)))
    runs = [ids[i : i + 4] for i in range(0, 20, 4)]
    assert all(run == list(range(run[0], run[0] + 4)) for run in runs)
    assert [run[0] for run in runs] != [0, 4, 8, 12, 16]


def test_an_order_of_ones_own_may_leave_out_and_repeat_and_that_is_told():
    schedule = Schedule(10, 4, 2, 1, lambda epoch, generator: [0, 1, 1, 2, 3])
    assert ids_of(schedule) == [0, 1, 1, 2, 3]
    assert schedule.remark == "the job's order leaves out 6 of 10 samples and has 1 more than once"
    assert not Schedule(10, 4, 2, 1, lambda epoch, generator: np.arange(10)).remark


def test_drop_last_leaves_out_the_smaller_batch():
    assert [len(batch) for step in of(Schedule(21, 4, 2, 1, drop_last=True)) for batch in step] == [4] * 5
    assert Schedule(21, 4, 2, 1, drop_last=True).per_epoch == 20
    assert [len(step) for step in of(Schedule(21, 16, None, 1, drop_last=True))] == [8]
    with pytest.raises(TrainingFailed, match="drop_last leaves nothing: 3 samples are less than one batch"):
        Schedule(3, 4, 2, 1, drop_last=True)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (lambda epoch, generator: [], "it is empty"),
        (lambda epoch, generator: [[1], []], "it is empty, or has an empty batch"),
        (lambda epoch, generator: itertools.count(), "is it endless"),
        (lambda epoch, generator: itertools.repeat([0, 1]), "is it endless"),
        (lambda epoch, generator: [0, 10], "there is no sample 10; they go from 0 to 9"),
        (lambda epoch, generator: [-1], "there is no sample -1"),
        (lambda epoch, generator: [0.5], "ids are whole numbers"),
        (lambda epoch, generator: None, "it gave NoneType"),
        (lambda epoch, generator: "abc", "it gave str"),
        (lambda epoch, generator: 1 / 0, "order failed for epoch 0: ZeroDivisionError"),
        (lambda epoch, generator: [next(COUNTER) % 10], "gives another order for epoch 0"),
        (wide.order.weighted([1.0] * 3), "has 3 weights for 10 samples"),
        (wide.order.by_length([1] * 3), "has 3 lengths for 10 samples"),
    ],
)
def test_an_order_that_cannot_be_used_is_explained(order, words):
    with pytest.raises(TrainingFailed, match=words):
        Schedule(10, 4, 2, 1, order)


@pytest.mark.parametrize(
    "make_it", [lambda: wide.order.weighted([0, 0]), lambda: wide.order.weighted([-1, 2]), lambda: wide.order.blocks(0)]
)
def test_an_order_with_numbers_that_mean_nothing_is_refused(make_it):
    with pytest.raises(UsageError):
        make_it()


# ── a DataLoader ─────────────────────────────────────────────────────────────────────────────────────────────────────

DATA = TensorDataset(torch.arange(30.0)[:, None], torch.arange(30))


def loaded(**options):
    samples = Samples(make(dataset=lambda: DataLoader(DATA, **options), batch_size=32), 0)
    order = (samples.batch_size, None, 0, samples.order, samples.drop_last)
    return samples, Schedule(len(samples), *order)


def test_a_loader_says_how_large_a_batch_is_and_in_which_order():
    samples, schedule = loaded(batch_size=10)
    assert (samples.batch_size, ids_of(schedule)) == (10, list(range(30)))
    _, schedule = loaded(batch_size=8, shuffle=True, drop_last=True)
    assert len(set(ids_of(schedule))) == 24
    assert ids_of(schedule) == ids_of(Schedule(30, 8, None, 0))[:24]


def test_a_loaders_own_sampler_is_asked_anew_every_epoch():
    _, schedule = loaded(batch_size=10, sampler=RandomSampler(DATA, replacement=True, num_samples=25))
    one, both = ids_of(schedule), ids_of(schedule, 2)
    assert len(one) == 25
    assert both[:25] == one != both[25:]


def test_batches_that_a_loaders_sampler_makes_are_the_updates():
    _, schedule = loaded(batch_sampler=BatchSampler(SequentialSampler(DATA), 12, drop_last=False))
    assert [sum(len(batch) for batch in step) for step in of(schedule)] == [12, 12, 6]
    class_batches = [[0, 2, 4], [1, 3, 5, 7]]
    _, schedule = loaded(batch_sampler=class_batches)
    assert [[i for batch in step for i in batch] for step in of(schedule)] == class_batches


def test_a_loaders_collate_is_used():
    samples, _ = loaded(batch_size=10, collate_fn=lambda items: {"n": len(items)})
    assert samples.batch(torch.arange(3), 0) == {"n": 3}
    samples, _ = loaded(batch_size=10)
    assert samples.is_gathered


def test_two_batch_sizes_are_one_too_many():
    with pytest.raises(TrainingFailed, match="batch_size 10, and the job has 16"):
        Samples(make(dataset=lambda: DataLoader(DATA, batch_size=10), batch_size=16), 0)
