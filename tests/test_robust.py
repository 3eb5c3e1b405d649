"""`--robust`: folds against a reference in numpy, and pools with one node that lies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faults.invariants import check_buffers
from tests.jobs import make, points
from tests.twin import Twin
from wide.codec.layout import scale
from wide.config import SERVE_AUDIT, check_robust, idle_audit, resolve
from wide.coordinator.events import MergeUpdate
from wide.coordinator.master import Master
from wide.coordinator.resume import remembered
from wide.errors import UsageError
from wide.job.model import build_model
from wide.job.schedule import Schedule
from wide.strategy.catalogue import STRATEGIES
from wide.strategy.gather import Part, Sum
from wide.strategy.policy import Made
from wide.strategy.robust import GATHERINGS, MIDDLE, TRIMMED, middle_
from wide.strategy.tree import Block

BATCHNORM = make(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)),
    optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
)


def reference(values, weights, trimmed):
    """Number by number: what lies between two quantiles of the weight, as one would write it down."""
    shares = np.array(weights) / sum(weights)
    trimmed, found = min(max(trimmed, shares.max()), MIDDLE), []
    for column in values.T:
        order, at, total, mass = np.argsort(column), 0.0, 0.0, 0.0
        for i in order:
            inside = max(0.0, min(at + shares[i], 1 - trimmed) - max(at, trimmed))
            total, mass, at = total + inside * column[i], mass + inside, at + shares[i]
        found.append(total / mass)
    return np.array(found)


@given(st.integers(3, 9), st.sampled_from([0.0, TRIMMED, MIDDLE]), st.integers(0, 1000))
def test_the_middle_is_what_a_loop_finds(nodes, trimmed, seed):
    chance = np.random.default_rng(seed)
    values, weights = chance.normal(size=(nodes, 7)), chance.uniform(0.1, 2, size=nodes).tolist()
    runs = [torch.tensor(weight * value) for weight, value in zip(weights, values, strict=True)]
    middle_(runs, weights, trimmed)
    assert np.allclose(runs[0].numpy() / sum(weights), reference(values, weights, trimmed))
    assert not any(run.any() for run in runs[1:])


def test_equal_weights_give_numpys_median_and_a_trimmed_mean():
    values = torch.randn(6, 100, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    median, mean = ([value.clone() for value in values] for _ in range(2))
    middle_(median, [1.0] * 6, MIDDLE)
    assert np.allclose(median[0].numpy() / 6, np.median(values.numpy(), axis=0))
    middle_(mean, [1.0] * 6, 1 / 3)
    assert np.allclose(mean[0].numpy() / 6, np.sort(values.numpy(), axis=0)[2:4].mean(axis=0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64, torch.float64])
def test_other_kinds_of_numbers_have_a_middle_too(dtype):
    runs = [torch.full((5,), value).to(dtype) for value in (1.0, 2.0, 1e6)]
    middle_(runs, [1.0] * 3, MIDDLE)
    assert torch.allclose(runs[0].real.float() if dtype.is_complex else runs[0].float(), torch.full((5,), 6.0))


def test_more_numbers_than_are_sorted_at_once(monkeypatch):
    monkeypatch.setattr("wide.strategy.robust.CHUNK", 8)
    runs = [torch.arange(10.0) * times for times in (1, 2, 9)]
    middle_(runs, [1.0] * 3, MIDDLE)
    assert torch.allclose(runs[0], 3 * 2 * torch.arange(10.0))


# ── gatherings ───────────────────────────────────────────────────────────────────────────────────────────────────


class Said:
    """A master, and updates of one number in all places."""

    def __init__(self, robust, job=BATCHNORM):
        self.master = Master(job, build_model(job, 0), 0)
        self.gather = GATHERINGS[robust](self.master)

    def update(self, value, weight=1.0, logged=0.0):
        flat = self.master.spare.take()
        flat.raw.zero_()
        for run in (*flat.trainable_runs, *flat.averaged_runs):
            run.fill_(value * weight)
        flat.touched, flat.weights, flat.logged = 1, [], {"a": (logged, 1.0)} if logged else {}
        return flat

    def version(self, *parts):
        """Each (node, value, weight): what they come to, over their weight."""
        for node, value, weight in parts:
            update, part = self.update(value, weight), Part(node, weight)
            self.gather.fit(update, part)
            self.gather.add(update, part)
        assert len(self.gather.held) == self.master.spare.in_use
        total = self.gather.take()
        found = total.trainable_runs[0][0].item() / sum(weight for *_, weight in parts)
        assert total.averaged_runs[0][0].item() == pytest.approx(found * sum(weight for *_, weight in parts))
        self.master.release(total)
        assert self.master.spare.in_use == 0
        assert not self.gather.held
        return found


@pytest.mark.parametrize("robust", GATHERINGS)
def test_one_of_four_does_not_carry_the_first_version_away(robust):
    assert abs(Said(robust).version((4, -1000.0, 0.25), (1, 1.0, 0.25), (2, 1.0, 0.25), (3, 1.0, 0.25))) <= 1.0


@pytest.mark.parametrize("robust", GATHERINGS)
def test_where_all_say_the_same_it_is_the_mean(robust):
    said = Said(robust)
    for value in (1.0, -1.0, 1.0):
        assert said.version((1, value, 0.5), (2, value, 0.3), (3, value, 0.1), (1, value, 0.1)) == pytest.approx(value)


@pytest.mark.parametrize("robust", GATHERINGS)
def test_what_two_say_is_cut_to_what_is_usual(robust):
    said = Said(robust)
    for _ in range(2):
        said.version((1, 1.0, 0.5), (2, 1.0, 0.5), (3, 1.0, 0.5))
    assert said.version((1, 1.0, 0.5), (2, 1000.0, 0.5)) == pytest.approx(1.0)
    assert said.version((2, 1000.0, 0.5)) == pytest.approx(1.0)


@pytest.mark.parametrize("robust", ["trimmed", "median"])
def test_a_node_has_one_voice_however_often_it_speaks(robust):
    assert Said(robust).version(*[(4, 1000.0, 0.05)] * 9, (1, 1.0, 0.3), (2, 2.0, 0.3), (3, 3.0, 0.3)) <= 3.0


def test_clip_keeps_weights_and_directions():
    said = Said("clip")
    said.version((1, 1.0, 1.0), (2, 1.0, 1.0), (3, 1.0, 1.0))
    assert said.version((1, 0.5, 3.0), (2, -8.0, 1.0)) == pytest.approx((3 * 0.5 - 1) / 4)


@pytest.mark.parametrize("robust", GATHERINGS)
def test_what_is_void_is_given_back(robust):
    said = Said(robust)
    for node in (1, 2, 3, 1):
        update, part = said.update(1.0), Part(node, 1.0)
        said.gather.fit(update, part)
        said.gather.add(update, part)
    said.gather.void()
    assert said.master.spare.in_use == 0
    assert said.version((1, 1.0, 1.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("robust", [None, *GATHERINGS])
@pytest.mark.parametrize("strategy", ["async", "local"])
def test_a_fold_keeps_totals_counts_and_what_was_logged(strategy, robust):
    """The losses are totals: each of four leases says how much it counts."""
    job = BATCHNORM
    master, schedule = Master(job, build_model(job, 0), 0), Schedule(64, 4, 4, 0)
    gathering = GATHERINGS[robust] if robust else Sum
    fold, before = STRATEGIES[strategy].fold(master, schedule, None, gathering), master.weights.trainable[0].clone()
    group = int(strategy == "local")
    for at in range(4):
        flat = master.spare.take()
        flat.raw.zero_()
        for run in flat.trainable_runs:
            run.fill_(0.5 if group else 0.5 * 30.0)
        flat.touched, flat.logged, flat.weights = (1 << len(flat.trainable)) - 1, {}, [] if group else [30.0]
        fold.merge(MergeUpdate(at + 1, at + 1, Block(at, at + 1), 1, group=group), flat)
    fold.make(Made(1.0, 1), 1)
    assert torch.allclose(before - master.weights.trainable[0], torch.tensor(0.5 if group else 0.05))
    assert master.spare.in_use == 0


# ── pools ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Strict:
    """Takes every broken promise for a failure."""

    def refuse(self, why):
        raise AssertionError(why)


def trained(job, times=1.0, **given):
    """Four nodes, the last of which hands in so many times what it computed. Returns the twin."""
    twin = Twin(job, **given)
    nodes = [twin.join(name) for name in ("a", "b", "c", "d")]
    hand_in = nodes[3].session._hand_in

    def lie(package, total, losses, compute_s):
        scale(total, times)
        hand_in(package, total, losses, compute_s)

    nodes[3].session._hand_in = lie
    turn = twin.turn

    def checked(*args):
        turn(*args)
        check_buffers(Strict(), twin.server)

    twin.turn = checked
    twin.train(*nodes)
    return twin


def weights(twin):
    return torch.cat([view.reshape(-1).double() for view in twin.master.weights.trainable])


@pytest.mark.parametrize("strategy", ["async", "local"])
@pytest.mark.parametrize("robust", GATHERINGS)
def test_a_pool_with_a_liar_ends_where_an_honest_one_does(robust, strategy):
    job = make(dataset=lambda: points(256), batches_per_step=8)
    start = torch.cat([p.detach().reshape(-1).double() for p in build_model(job, job.seed).parameters()])
    honest = weights(trained(job, strategy=strategy, steps=12))
    twin = trained(job, times=1000.0, strategy=strategy, steps=12, robust=robust)
    assert (weights(twin) - honest).norm() < (honest - start).norm()
    assert twin.master.spare.in_use == 0


def test_honest_pools_end_at_much_the_same_weights():
    job = make(dataset=lambda: points(256), batches_per_step=8)
    start = torch.cat([p.detach().reshape(-1).double() for p in build_model(job, job.seed).parameters()])
    honest = weights(trained(job, strategy="local", steps=12))
    for robust in GATHERINGS:
        found = weights(trained(job, strategy="local", steps=12, robust=robust))
        assert (found - honest).norm() < 0.5 * (honest - start).norm()


@pytest.mark.parametrize("strategy", ["sync", "async", "local"])
def test_the_gatekeeper_hears_of_every_update_and_doubts_the_long_ones(strategy):
    job, said = make(dataset=lambda: points(256), batches_per_step=8), []
    twin = Twin(job, strategy=strategy, steps=100)  # so that it goes on after the first updates
    nodes = [twin.join(name) for name in ("a", "b", "c", "d")]
    doubt = twin.server._gate.doubt
    twin.server._gate.doubt = lambda lease, seen: said.append((seen.node, doubt(lease, seen))) or said[-1][1]
    for _ in range(200):
        if len(said) > 24:
            break
        for node in nodes:
            node.work()
        twin.turn()
    assert not any(words for _, words in said)
    hand_in = nodes[3].session._hand_in
    nodes[3].session._hand_in = lambda package, total, *rest: (scale(total, 1e3), hand_in(package, total, *rest))[1]
    twin.train(*nodes)
    assert next(node for node, words in said if words) == nodes[3].number
    assert not twin.server._gate._doubted


# ── options ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sync_cannot_be_robust_and_says_so():
    for strategy in (None, "sync"):
        with pytest.raises(UsageError, match="--robust clip is for --strategy async, local or auto"):
            check_robust(resolve({"robust": "clip", "strategy": strategy}, {}))
    for strategy in ("async", "local", "auto"):
        check_robust(resolve({"strategy": strategy}, {"WIDE_ROBUST": "median"}))
    with pytest.raises(UsageError, match="expected clip or trimmed or median"):
        resolve({"robust": "krum"}, {})


def test_a_run_remembers_that_it_is_robust():
    before = {"seed": 0, "strategy": "async", "robust": "clip"}
    assert remembered(resolve({}, {}), before, "here").robust == "clip"
    assert remembered(resolve({"robust": "median"}, {}), before, "here").robust == "median"
    assert remembered(resolve({"strategy": "sync"}, {}), before, "here").robust is None


@pytest.mark.parametrize(("robust", "is_eager"), [(None, True), ("clip", True), ("trimmed", False), ("median", False)])
def test_what_needs_all_updates_of_a_version_moves_nothing_before(robust, is_eager):
    twin = Twin(BATCHNORM, strategy="async", robust=robust)
    assert twin.pool._is_eager is is_eager


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"audit": 0.5, "strategy": "async"}, "--audit 0.5 does nothing: in --strategy async"),
        ({"audit": 0.5, "strategy": "local"}, "--audit 0.5 does nothing: in --strategy local"),
        ({"audit": 0.5, "compress": "int8"}, "--compress int8 leaves no bits"),
        ({"audit": 0.5, "check": False}, "--audit 0.5 does nothing: --no-check"),
        ({"audit": 0.5}, ""),
        ({"audit": 0.5, "strategy": "auto"}, ""),
        ({"audit": 0.5, "compress": "zstd"}, ""),
        ({"audit": SERVE_AUDIT, "strategy": "async"}, ""),
        ({"strategy": "local", "compress": "int8"}, ""),
    ],
)
def test_an_audit_that_can_do_nothing_is_told_of(given, words):
    assert words in idle_audit(resolve(given, {}))
    assert bool(idle_audit(resolve(given, {}))) == bool(words)
