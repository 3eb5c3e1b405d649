"""The mathematics of the strategies: golden values, equivalences, and when a version is due. No network, no processes."""

from __future__ import annotations

import dataclasses
import math
import random
from itertools import pairwise
from typing import get_args

import msgspec
import pytest
import torch
from torch import nn

from tests.jobs import make, points
from wide.codec.choose import ROLES
from wide.config import Strategy as Wish
from wide.coordinator.events import MergeUpdate
from wide.coordinator.master import Master
from wide.job.model import build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule
from wide.node.fused import Fused
from wide.node.local import OwnSteps
from wide.node.trainer import Place, Trainer
from wide.node.training import TRAININGS, Training
from wide.strategy.catalogue import EXACT, MEASURES, STRATEGIES
from wide.strategy.delayed import Delayed
from wide.strategy.description import Measured, Setting, Stage, Strategy, Travel
from wide.strategy.fold import Fold
from wide.strategy.line import Line
from wide.strategy.outer import Nesterov, Outer, momentum_for
from wide.strategy.policy import Made, Policy
from wide.strategy.rounds import may_close, usual_s
from wide.strategy.tree import Block

CPU = torch.device("cpu")


# ── golden values ────────────────────────────────────────────────────────────────────────────────────────────────


def test_delayed_nesterov_with_n_equal_pushes_from_rest_is_one_nesterov_step():
    torch.manual_seed(0)
    gradient, start, rate, momentum, n = torch.randn(7), torch.randn(7), 0.1, 0.9, 8
    weight = nn.Parameter(start.clone())
    delayed, optimizer = Delayed([weight]), torch.optim.SGD([weight], rate, momentum, nesterov=True)
    for _ in range(n):
        delayed.push([gradient / n], [rate])
    assert torch.allclose(weight, start - rate * gradient)  # all of the gradient, none of the momentum
    delayed.restore()
    weight.grad = gradient
    optimizer.step()
    assert torch.allclose(weight, start - rate * (gradient + momentum * gradient))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_no_rate_is_too_large_to_be_pushed(dtype):
    """It may have been divided by what a node says that its batches weigh."""
    weight = torch.zeros(2, dtype=dtype)
    delayed = Delayed([weight])
    delayed.push([torch.ones(2, dtype=dtype)], [1e300])
    delayed.restore()
    assert not weight.any()


def test_delayed_nesterov_follows_the_published_recursion():
    """Each arrival θ −= ηg/N, Δ += g; every N-th m ← βm + Δ/N, θ −= ηβm, Δ ← 0."""
    torch.manual_seed(1)
    n, rate, beta, start = 4, 0.05, 0.9, torch.randn(5)
    theta, m, delta = start.clone(), torch.zeros(5), torch.zeros(5)
    weight = nn.Parameter(start.clone())
    delayed, optimizer = Delayed([weight]), torch.optim.SGD([weight], rate, beta, nesterov=True)
    total = torch.zeros(5)
    for i in range(1, 4 * n + 1):
        g = torch.randn(5)
        theta, delta = theta - rate * g / n, delta + g
        delayed.push([g / n], [rate])
        total += g / n
        if i % n == 0:
            m = beta * m + delta / n
            theta, delta = theta - rate * beta * m, torch.zeros(5)
            delayed.restore()
            weight.grad, total = total, torch.zeros(5)
            optimizer.step()
        assert torch.allclose(weight, theta, atol=1e-6)


def test_two_fragments_of_streaming_diloco():
    """H=6, inner −2 per step, outer SGD lr 2, start 1: fragment 0 at steps 3 and 9, fragment 1 at step 6."""
    local = [torch.ones(1), torch.ones(1)]
    agreed, outer, seen = [torch.ones(1), torch.ones(1)], [Nesterov(), Nesterov()], {}
    for step in range(1, 10):
        for fragment in local:
            fragment -= 2
        if step % 3 == 0:
            which = (step // 3 - 1) % 2
            outer[which].step([agreed[which]], [agreed[which] - local[which]], Outer(2.0, 0.0))
            local[which].copy_(agreed[which])
            seen[which, step] = agreed[which].item()
    assert seen == {(0, 3): -11, (1, 6): -23, (0, 9): -35}


def test_outer_nesterov_is_pytorchs():
    torch.manual_seed(2)
    ours = torch.randn(9)
    theirs = nn.Parameter(ours.clone())
    optimizer, outer = torch.optim.SGD([theirs], 0.7, 0.9, nesterov=True), Nesterov()
    for _ in range(5):
        delta = torch.randn(9)
        outer.step([ours], [delta], Outer(0.7, 0.9))
        theirs.grad = delta
        optimizer.step()
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_momentum_fits_the_length_of_a_round():
    assert momentum_for(1) == Outer(1.0, 0.0)  # data parallel
    lengths = [momentum_for(length) for length in (2, 4, 16, 50, 500)]
    assert all(a.momentum < b.momentum <= 0.5 for a, b in pairwise(lengths))
    assert all(outer.rate + outer.momentum == 1 for outer in lengths)


# ── equivalences ─────────────────────────────────────────────────────────────────────────────────────────────────


class Bench:
    """A master and trainers without a network."""

    def __init__(self, job, strategy, nodes):
        torch.set_num_threads(1)
        self.job, self.samples = job, Samples(job, job.seed)
        self.schedule = Schedule(len(self.samples), job.batch_size, job.batches_per_step, job.seed)
        self.master = Master(job, build_model(job, job.seed), job.seed)
        self.fold = STRATEGIES[strategy].fold(self.master, self.schedule, None)
        self.trainers = [Trainer(job, job.seed, CPU) for _ in range(nodes)]
        self.locals = [OwnSteps(job, t, Fused(t), job.seed) for t in self.trainers]
        for trainer, local in zip(self.trainers, self.locals, strict=True):
            trainer.keep_versions()
            self.give(trainer)
            trainer.weights_changed()
            local.begin()

    def give(self, trainer):
        trainer.weights.raw.copy_(self.master.weights.raw)

    def lease(self, block):
        """(places, what gives their batches)."""
        items = [
            (step, batch, self.schedule.sizes(step, batch, batch + 1)[0])
            for step, first, end in self.schedule.stretches(*block)
            for batch in range(first, end)
        ]

        def batch_at(i):
            step, batch, _ = items[i]
            return self.samples.batch(
                self.schedule.ids(step, batch, batch + 1), self.trainers[0].seed_of(step.number, batch)
            )

        return [Place(step.number, batch, n, n / step.samples) for step, batch, n in items], batch_at

    def taken(self, flat, trainer):
        mine = self.master.spare.take()
        mine.raw.copy_(flat.raw)
        mine.touched = flat.touched
        trainer.release(flat)
        return mine

    def gradient(self, node, block):
        flat, _ = self.trainers[node].compute(*self.lease(block))
        return self.taken(flat, self.trainers[node])

    def delta(self, node, block, group, refresh=True):
        if refresh:
            self.give(self.trainers[node])
            self.locals[node].rebase()
        self.locals[node].train(*self.lease(block), group, lambda done, of: True)
        return self.taken(self.locals[node].delta(), self.trainers[node])

    def merge(self, block, update):
        self.fold.merge(MergeUpdate(1, 1, block, 1), update)

    def weights(self):
        return torch.cat([view.reshape(-1).double() for view in self.master.weights.trainable])


def synchronous(job, steps):
    bench = Bench(job, "sync", 1)
    for number in range(steps):
        bench.give(bench.trainers[0])
        bench.trainers[0].weights_changed()
        first = bench.schedule.position(number)
        block = Block(first, first + bench.schedule.step(number).batches)
        bench.merge(block, bench.gradient(0, block))
        bench.fold.make(Made(1.0), number + 1)
    return bench


JOBS = {
    "sgd": make(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "adamw, scheduler, clipping": make(
        optimizer=lambda p: torch.optim.AdamW(p, lr=0.01),
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        clip_norm=0.5,
    ),
    "batchnorm": make(
        model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    ),
}


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("length", [1, 3])
def test_local_training_on_one_node_is_plain_training(name, length):
    """Whatever the length of a round: a step of the node is a step of the job, and the outer one changes nothing."""
    job, steps = msgspec.structs.replace(JOBS[name], dataset=lambda: points(96)), 6  # no short step at an epoch's end
    expected = synchronous(job, steps)
    bench = Bench(job, "local", 1)
    for first in range(0, steps, length):
        block = Block(bench.schedule.position(first), bench.schedule.position(first + length))
        bench.merge(block, bench.delta(0, block, job.batches_per_step))
        bench.fold.make(Made(float(length), length=1), first + length)
    assert torch.allclose(bench.weights(), expected.weights(), atol=1e-6)
    for ours, theirs in zip(bench.master.weights.averaged, expected.master.weights.averaged, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)


def test_data_parallel_training_is_local_training_with_rounds_of_one_step():
    job, nodes = make(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), batches_per_step=4), 4
    expected = synchronous(job, 2)
    bench = Bench(job, "local", nodes)
    for number in range(2):
        first = bench.schedule.position(number)
        blocks = [Block(first + i, first + i + 1) for i in range(nodes)]
        for block, update in [(block, bench.delta(node, block, 1)) for node, block in enumerate(blocks)]:
            bench.merge(block, update)
        bench.fold.make(Made(1.0, length=1), number + 1)
    assert torch.allclose(bench.weights(), expected.weights(), atol=1e-6)


def test_equal_nodes_with_equal_batches_are_one_node():
    job = JOBS["sgd"]
    one, three = Bench(job, "local", 1), Bench(job, "local", 3)
    for number in range(4):
        block = Block(4 * number, 4 * number + 4)
        one.merge(block, one.delta(0, block, 2))
        for update in [three.delta(node, block, 2) for node in range(3)]:
            three.merge(block, update)
        for bench in (one, three):
            bench.fold.make(Made(1.0, length=2), number + 1)
    assert torch.allclose(one.weights(), three.weights(), atol=1e-6)


@pytest.mark.parametrize("name", JOBS)
def test_async_without_staleness_is_syncs_mathematics(name):
    job, steps, chance = JOBS[name], 5, random.Random(1)
    expected = synchronous(job, steps)
    bench = Bench(job, "async", 2)
    for number in range(steps):
        first = bench.schedule.position(number)
        batches = bench.schedule.step(number).batches
        cuts = sorted(chance.sample(range(1, batches), min(2, batches - 1)))
        edges = [0, *cuts, batches]
        blocks = [Block(first + a, first + b) for a, b in pairwise(edges)]
        for trainer in bench.trainers:
            bench.give(trainer)
            trainer.weights_changed()
        updates = [(block, bench.gradient(i % 2, block)) for i, block in enumerate(blocks)]
        chance.shuffle(updates)
        for i, (block, update) in enumerate(updates):
            bench.merge(block, update)
            is_step = i == len(updates) - 1
            bench.fold.make(Made(float(is_step), is_step=is_step), number + 1)
    assert torch.allclose(bench.weights(), expected.weights(), atol=1e-6)


def test_async_with_sgd_moves_the_weights_as_soon_as_a_gradient_arrives():
    bench = Bench(JOBS["sgd"], "async", 1)
    before = bench.weights()
    bench.merge(Block(0, 1), bench.gradient(0, Block(0, 1)))
    moved = bench.weights()
    assert not torch.equal(moved, before)
    bench.fold.bring_back()
    assert torch.equal(bench.weights(), before), "but whoever looks at them sees whole steps"


def test_overlap_puts_each_step_into_exactly_one_delta():
    """New weights arrive in the middle of a lease: what was learned since the last delta stays, nothing counts twice."""
    job = make(optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    bench = Bench(job, "local", 1)
    local, trainer = bench.locals[0], bench.trainers[0]
    start = numbers(trainer.bound)
    first = numbers(bench.delta(0, Block(0, 2), 1))
    local.train(*bench.lease(Block(2, 3)), 1, lambda done, of: True)  # the next lease has begun,
    progress = numbers(trainer.bound) - (start - first)
    with torch.no_grad():
        for weight in trainer.weights.trainable:  # when weights from elsewhere come
            weight.add_(5)
    local.rebase()
    assert torch.allclose(numbers(trainer.bound), start + 5 + progress, atol=1e-5)
    assert torch.allclose(numbers(bench.taken(local.delta(), trainer)), -progress, atol=1e-5)


def numbers(flat):
    return torch.cat([view.detach().clone().reshape(-1) for view in flat.trainable])


# ── cutting and closing ──────────────────────────────────────────────────────────────────────────────────────────


def test_the_line_hands_out_every_batch_once_and_reports_steps_in_their_order():
    chance, schedule = random.Random(3), Schedule(100, 3, 4, seed=0)  # 34 batches an epoch, steps of 4, the last of 2
    line, out, merged, closed = Line(Stage(schedule, 0, 12)), [], [], []
    while not line.is_complete:
        if line.free and (not out or chance.random() < 0.5):
            out.append(line.cut(chance.randint(1, 9)))
        else:
            block = out.pop(chance.randrange(len(out)))
            if chance.random() < 0.3:
                line.give_back(block)
            else:
                merged += range(*block)
                closed += line.accept(block)
    assert sorted(merged) == list(range(schedule.position(12)))
    assert closed == list(range(12))


def test_a_line_can_end_at_the_next_step():
    line = Line(Stage(Schedule(100, 1, 10, seed=0), 0, None))
    line.cut(13)
    assert line.end_soon() == 2
    assert line.free == 7


def test_a_round_closes_with_all_or_with_a_quorum_after_the_grace_window():
    usual = [1.0, 1.1, 0.9, 1.0, 1.05]
    assert may_close(0, 4, 99.0, usual)[0] is False
    assert may_close(4, 0, 0.1, [])[0] is True
    assert may_close(1, 3, 99.0, usual) == (False, "1 of 4 are no quorum")
    assert may_close(3, 1, 1.1, usual)[0] is False
    assert may_close(3, 1, 99.0, [])[0] is False, "nothing is known yet: wait"
    is_due, why = may_close(3, 1, 2.0, usual)
    assert is_due
    assert "median" in why


def test_the_grace_window_follows_the_nodes_not_a_fixed_timeout():
    assert usual_s([]) == math.inf
    assert usual_s([10.0, 10.0, 10.0]) == 15.0
    assert usual_s([1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0 + 4 * 1.0


# ── the catalogue ────────────────────────────────────────────────────────────────────────────────────────────────


def questions(protocol):
    """What whoever follows this protocol must be able to answer."""
    asked = {name for name in vars(protocol) if not name.startswith("_")} | protocol.__annotations__.keys()
    assert asked
    return asked


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_description_of_a_strategy_is_complete(name):
    strategy, bench = STRATEGIES[name], Bench(JOBS["sgd"], name, 1)
    assert strategy.name == name
    assert strategy.why
    assert all(getattr(strategy, field.name) is not None for field in dataclasses.fields(Strategy))
    assert strategy.update_role in ROLES
    assert 0 <= strategy.enough <= 1, "else no plan could end in it"
    assert 0 < strategy.memory < 1
    assert strategy.most_stale >= 0
    policy = strategy.policy(Stage(bench.schedule, 0, 3))
    assert [question for question in questions(Policy) if not hasattr(policy, question)] == []
    assert [question for question in questions(Fold) if not hasattr(bench.fold, question)] == []
    nodes = [Measured(1, "atlas", 40.0, {}), Measured(2, "bee", 10.0, {})]
    assert 0 < strategy.forecast(nodes, [Travel(0.1, 0.1)] * 2, Setting(4, 0.001)) <= 50.0


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_node_knows_how_to_train_in_every_strategy(name):
    assert TRAININGS.keys() == STRATEGIES.keys()
    job = make()
    trainer = Trainer(job, job.seed, CPU)
    training = TRAININGS[name](job, trainer, Fused(trainer))
    assert [question for question in questions(Training) if not hasattr(training, question)] == []


def test_a_user_can_ask_for_every_strategy_or_for_whichever_is_best():
    assert set(get_args(Wish)) == {*STRATEGIES, "auto"}
    assert {EXACT.name, MEASURES.name} <= STRATEGIES.keys()


# ── several batches in one pass ──────────────────────────────────────────────────────────────────────────────────


def fused_for(job, count=8, times=12):
    bench = Bench(job, "async", 1)
    trainer = bench.trainers[0]
    fused = Fused(trainer)
    places, batch_at = bench.lease(Block(0, count))
    for _ in range(times):
        total, losses = fused.sum(places, batch_at)
        expected, separate = trainer.sum(places, batch_at)
        for ours, theirs in zip(total.trainable, expected.trainable, strict=True):
            assert torch.allclose(ours, theirs, atol=1e-5)
        assert len(losses) == len(separate)
        assert math.isclose(sum(losses), sum(separate), rel_tol=1e-4)
        trainer.release(total)
        trainer.release(expected)
    return fused


def wide_model():
    return nn.Sequential(nn.Linear(6, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))


def test_batches_in_one_pass_give_the_same_gradient(monkeypatch):
    monkeypatch.setattr("wide.node.fused.GAIN", 0.0)  # quicker or not
    assert fused_for(make(model=wide_model, batches_per_step=8)).width > 1


@pytest.mark.parametrize(
    "changes",
    [
        dict(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.Linear(8, 3))),
        dict(model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))),
        dict(
            model=lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3))
        ),
        dict(loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="sum")),
        dict(loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]) + model(batch[0]).std()),
    ],
    ids=["dropout", "batchnorm", "batchnorm without buffers", "a sum", "samples compared with each other"],
)
def test_what_would_not_be_the_same_mathematics_is_never_put_together(monkeypatch, changes):
    monkeypatch.setattr("wide.node.fused.GAIN", 0.0)
    assert fused_for(make(batches_per_step=8, **changes)).width == 1
