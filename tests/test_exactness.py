"""The same bits from any pool: the plain program, one process, and pools that cut the work in any way."""

from __future__ import annotations

import random

import pytest
import torch

from tests import plain
from tests.jobs import EVERYTHING
from wide.codec.batch import pack, unpack
from wide.coordinator.events import MergeUpdate
from wide.coordinator.master import Master
from wide.job.here import Here
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.node.trainer import Place, Trainer
from wide.store.weights import weights_sha256
from wide.strategy.policy import Made
from wide.strategy.synchronous import OpenStep, TreeFold
from wide.strategy.tree import Block

STEPS = 7  # more than two epochs of three steps


def in_a_pool(job, steps, nodes, seed, streamed=False):
    """Trainers and a master without a network: the work is cut, shared out and handed in at random."""
    torch.set_num_threads(job.threads)
    chance = random.Random(seed)
    samples = Samples(job, job.seed)
    schedule = Schedule(len(samples), job.batch_size, job.batches_per_step, job.seed, job.order)
    here = lambda number: Here(number, schedule.step(number).epoch)  # noqa: E731
    master = Master(job, build_model(job, job.seed), job.seed, here=here)
    fold = TreeFold(master, schedule)
    trainers = [Trainer(job, job.seed, torch.device("cpu")) for _ in range(nodes)]
    for number in range(steps):
        step = schedule.step(number)
        opened, done = OpenStep(step.batches), []
        for trainer in trainers:
            trainer.weights.raw.copy_(master.weights.raw)
            trainer.weights_changed()
        while opened.free:
            block, trainer = opened.cut(chance.choice((1, 2, 4))), chance.choice(trainers)
            sizes = schedule.sizes(step, block.first, block.end)

            def batch_at(i, block=block, step=step, trainer=trainer):
                ids = schedule.ids(step, block.first + i, block.first + i + 1)
                batch = samples.batch(ids, trainer.seed_of(step.number, block.first + i))
                return over_the_wire(batch) if streamed else batch

            places = [Place(number, block.first + i, n, n / step.samples) for i, n in enumerate(sizes)]
            flat, _ = trainer.compute(places, batch_at)
            mine = master.spare.take()
            mine.raw.copy_(flat.raw)
            mine.touched, mine.weights, mine.logged = flat.touched, flat.weights, flat.logged
            trainer.release(flat)
            done.append((block, mine))
        chance.shuffle(done)
        for block, update in done:
            block = Block(*(schedule.position(number) + at for at in block))
            fold.merge(MergeUpdate(1, 1, block, number + 1), update)
        fold.make(Made(1.0), number + 1)
    return master.model


def over_the_wire(batch):
    packed = pack(batch)
    raw = torch.frombuffer(bytearray(b"".join(packed.buffers) or b"\0"), dtype=torch.uint8).clone()
    return unpack([packed.description], raw)[0]


@pytest.mark.parametrize("name", EVERYTHING)
def test_any_pool_gives_the_bits_of_the_plain_program(name):
    job = EVERYTHING[name]
    expected = weights_sha256(plain.train(job, STEPS))
    assert weights_sha256(in_a_pool(job, STEPS, nodes=1, seed=1)) == expected
    assert weights_sha256(in_a_pool(job, STEPS, nodes=3, seed=2)) == expected
    assert weights_sha256(in_a_pool(job, STEPS, nodes=2, seed=3, streamed=True)) == expected


def test_training_changes_the_weights():
    job = EVERYTHING["mlp"]
    assert weights_sha256(plain.train(job, 1)) != weights_sha256(plain.train(job, 2))


def test_unused_and_frozen_parameters_stay_as_they_were():
    job = EVERYTHING["odd parameters and buffers"]
    before, after = build_model(job, job.seed), in_a_pool(job, STEPS, nodes=2, seed=1)
    for name in ("unused.weight", "frozen.weight", "mask"):
        assert torch.equal(before.state_dict()[name], after.state_dict()[name])
    assert after.second.weight is after.first.weight
    assert not torch.equal(before.first.weight, after.first.weight)
