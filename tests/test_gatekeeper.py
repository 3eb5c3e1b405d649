"""The gatekeeper: what it doubts, and what it never does. Numbers only."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wide.coordinator.gatekeeper import BELIEVED, ENOUGH, FEW, MOST, MOST_CLIPPED, SOME, Gatekeeper, Seen
from wide.strategy.usual import WINDOW, Lengths, Median

SCATTER = st.floats(0.2, 5.0)  # honest updates were seen between 0.1 and 5 times the median, when nothing happened


class Gate:
    """Every update that is not doubted is merged."""

    def __init__(self, **given):
        self.keeper, self.lease = Gatekeeper(**given), 0

    def see(self, norm, amount=0.25, losses=(2.3,), node=None, kind="gradient", is_merged=None, **more):
        self.lease += 1
        seen = Seen(self.lease % 4 if node is None else node, kind, norm, amount, losses, **more)
        words = self.keeper.doubt(self.lease, seen)
        if is_merged if is_merged is not None else not words:
            self.keeper.merged(self.lease)
        else:
            self.keeper.forget(self.lease)
        return words

    def warm(self, updates=WINDOW, norm=0.1, **more):
        for _ in range(updates):
            assert not self.see(norm, **more)
        return self


# ── medians ──────────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=3 * WINDOW))
def test_a_running_median_is_the_windows_median(values):
    median = Median()
    for value in values:
        median.add(value)
    assert median.value == statistics.median_high(values[-WINDOW:])


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_a_delta_may_grow_with_its_steps_or_with_their_root(power):
    lengths = Lengths(wanders=True)
    for steps in (1, 2, 50, 500, 500, 400, 450):
        lengths.add(0.01 * steps**power, steps)
    for steps in (1, 50, 500):
        assert 0.01 * steps**power <= lengths.usual(steps) * 1.2


# ── what is honest ───────────────────────────────────────────────────────────────────────────────────────────────


@given(st.floats(1e-6, 1e6), st.lists(st.tuples(SCATTER, st.sampled_from([0.0625, 0.25, 0.5])), max_size=200))
def test_honest_updates_of_any_scale_and_size_are_never_doubted(scale, updates):
    gate = Gate()
    for scatter, amount in updates:
        assert gate.see(scale * scatter * amount, amount) == ""


@given(st.sampled_from([0.97, 0.99, 1.01, 1.02]), st.lists(st.floats(0.5, 2.0), min_size=200, max_size=400))
def test_a_slow_drift_is_followed(pace, updates):
    gate = Gate()
    for i, scatter in enumerate(updates):
        assert gate.see(pace**i * scatter, losses=[2.3 * pace ** (-i / 10)]) == ""


@given(st.integers(0, 100), st.floats(1.0, 10.0), st.lists(SCATTER, min_size=40, max_size=80))
def test_a_spike_common_to_all_is_never_doubted(calm, height, updates):
    gate = Gate().warm(calm)
    for scatter in updates:
        assert gate.see(0.1 * height * scatter, losses=[2.3 * height]) == ""


def test_the_first_updates_are_never_doubted():
    gate = Gate()
    for norm in (1e-30, 1e30, 0.0):
        assert not gate.see(norm)


def test_deltas_of_one_step_and_of_five_hundred_are_alike():
    gate = Gate()
    for steps in (1, 1, 1, 1, 2, 2, 2, 2, *[500] * 100, 1, 1, 3):
        assert not gate.see(0.05 * math.sqrt(steps), steps, kind="delta")
        assert not gate.see(0.01 * steps, steps, kind="delta")


def test_phases_and_kinds_are_compared_with_their_own():
    gate = Gate()
    for _ in range(50):
        assert not gate.see(1e-3, losses=[0.1], phase=0)
        assert not gate.see(1e3, losses=[1e5], phase=1)
        assert not gate.see(1e6, 10, kind="delta")
    assert gate.see(1e3, losses=[0.1], phase=0)


# ── what is not ──────────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(SCATTER, min_size=FEW, max_size=300), SCATTER, st.floats(1000, 1e30))
def test_a_thousandfold_update_is_always_doubted_after_three(updates, own, times):
    gate = Gate()
    for scatter in updates:
        gate.see(scatter)
    usual = gate.keeper._kinds["gradient", 0].lengths.usual(0.25)
    assert "times what is usual" in gate.see(max(own, 0.3 * usual) * times, is_merged=False)


@given(st.integers(FEW, 200), st.sampled_from(["gradient", "delta"]))
def test_it_stays_doubted_however_often_it_comes(known, kind):
    gate = Gate().warm(known, kind=kind, amount=1)
    for _ in range(200):
        assert gate.see(100.0, 1, kind=kind, is_merged=False)
    assert not gate.see(0.1, 1, kind=kind)


def test_a_zero_is_doubted_where_nobodys_is():
    gate = Gate().warm()
    assert "zero" in gate.see(0.0)
    assert "zero" in gate.see(1e-12)


def test_a_zero_is_not_doubted_where_zeros_are_usual():
    gate = Gate()
    for i in range(300):
        assert not gate.see(0.0 if i % 40 == 2 else 0.1)
    gate = Gate()
    for i in range(300):
        assert not gate.see(0.1 if i % 3 == 0 else 0.0)  # most of them are
    assert gate.see(100.0)


def test_batches_that_do_not_count_have_no_gradient():
    gate = Gate().warm(per_sample=1.0)
    assert not gate.see(0.0, 0.0, per_sample=0.0)
    assert "count 0" in gate.see(1.0, 0.0, per_sample=0.0)
    assert "count -1" in gate.see(0.0, -1.0, per_sample=-1.0)


def test_who_counts_samples_a_thousandfold_is_doubted():
    gate = Gate().warm(per_sample=30.0)
    assert not gate.see(4 * 0.1, 4 * 0.25, per_sample=120.0)
    assert "count 1e+03 times" in gate.see(1000 * 0.1, 1000 * 0.25, per_sample=30e3)


def test_a_loss_far_from_all_others_is_doubted():
    gate = Gate().warm()
    assert "a loss of 1e+09, where 2.3 is usual" in gate.see(0.1, losses=[2.0, 1e9, 2.0])
    assert "a loss of 1e+09" in gate.see(0.1, losses=[-1e9])
    assert not gate.see(0.1, losses=[1000.0])  # divergence.py does not look at it, either


def test_a_hard_sample_late_in_training_is_no_lie():
    gate = Gate().warm(losses=[1e-7])
    assert not gate.see(0.1, losses=[20.0])


def test_a_job_that_clips_its_gradients_may_have_long_ones():
    gate = Gate(is_clipped=True).warm()
    assert not gate.see(0.1 * MOST * 10)
    assert gate.see(0.1 * MOST_CLIPPED * 2)
    gate.warm(kind="delta", amount=4)  # its own steps were clipped
    assert gate.see(0.1 * MOST * 2, 4, kind="delta")


# ── what was believed ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", ["gradient", "delta"])
def test_where_all_have_changed_at_once_one_that_is_believed_is_enough(kind):
    gate = Gate().warm(kind=kind)
    assert gate.see(1000.0, losses=[1e7], kind=kind, is_merged=True)
    for _ in range(300):
        assert not gate.see(1000.0, losses=[1e7], kind=kind)
    assert gate.see(1000.0 * 1000, kind=kind)


def test_one_that_was_alone_is_soon_forgotten():
    gate = Gate().warm(3 * WINDOW)
    assert gate.see(1000.0, is_merged=True)
    gate.warm(SOME * BELIEVED)
    assert gate.see(1000.0)


def test_a_zero_that_is_believed_makes_others_usual():
    gate = Gate().warm()
    assert gate.see(0.0, is_merged=True)
    assert not gate.see(0.0)


# ── who has a say ────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_node_that_is_quick_does_not_say_what_is_usual():
    """It makes nine of ten updates, each a bit longer than the last: as long as it may."""
    gate, norm = Gate(), 0.1
    for _ in range(ENOUGH):
        for node in range(4):
            gate.see(0.1, node=node)
    for i in range(5000):
        if i % 10 == 9:
            assert not gate.see(0.1, node=1 + i // 10 % 3)
        else:
            norm *= 1.05 if not gate.see(norm, node=0) else 1 / 1.05
    assert norm < 0.1 * MOST * 1.1


def test_a_node_that_is_left_alone_is_heard_again():
    gate = Gate()
    for i in range(4 * WINDOW):
        gate.see(0.1, node=i % 4)
    for i in range(20_000):
        assert not gate.see(0.1 * 1.001**i, node=0)


def test_nothing_is_kept_of_what_was_decided():
    gate = Gate().warm(500)
    for _ in range(500):
        gate.see(1e9)
    assert not gate.keeper._doubted
    assert len(gate.keeper._window) <= WINDOW
    gate.keeper.forget(12_345)
    gate.keeper.merged(12_345)


def test_no_number_of_a_peers_is_divided_by():
    gate = Gatekeeper()
    for i in range(10):
        gate.doubt(i, Seen(i % 3, "gradient", 0.1, 1.0, [1.0], 1.0))
        gate.merged(i)
    assert gate.doubt(50, Seen(1, "gradient", 1.0, 5e-324, [1.0], 5e-324))
    gate.merged(50)
    assert gate.doubt(51, Seen(1, "gradient", 1e30, 1.0, [1.0], 1.0))


def test_totals_among_means_are_odd():
    gate = Gatekeeper()
    for i in range(10):
        gate.doubt(i, Seen(i % 3, "gradient", 0.1, 1.0, [1.0]))
        gate.merged(i)
    assert gate.doubt(50, Seen(1, "gradient", 0.1, 1.0, [1.0], 1.0))
