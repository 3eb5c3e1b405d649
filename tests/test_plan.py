"""Which strategy a pool should use: what was measured in, the decision and its reason out."""

from __future__ import annotations

import pytest

from wide.coordinator.planning import is_better
from wide.strategy.description import Measured, Setting, Travel
from wide.strategy.plan import forecast, plan, ring

SETTING = Setting(batches_per_step=16, busy_s=0.0005)


def node(number, speed=100.0, raw_s=0.001, int4_s=None):
    travel = {"raw": Travel(raw_s, raw_s)}
    if int4_s is not None:
        travel["int4"] = Travel(int4_s, int4_s)
    return Measured(number, f"n{number}", speed, travel)


def test_quick_links_are_trained_over_exactly():
    found = plan([node(i) for i in range(1, 5)], SETTING)
    assert found.strategy == "sync"
    assert found.forecasts["sync"].utilisation > 0.85
    assert "exact" in found.reason


def test_slow_links_are_talked_over_seldom():
    found = plan([node(i, raw_s=0.36) for i in range(1, 5)], SETTING)
    assert found.strategy == "local"
    assert found.forecasts["local"].utilisation > 0.95
    assert found.forecasts["sync"].utilisation < 0.1
    assert "too slow for an update of every step" in found.reason


def test_a_link_that_nobody_waits_for_is_of_no_use_in_sync():
    nodes = [*(node(i) for i in range(1, 9)), node(9, speed=10.0, raw_s=0.02)]
    found = plan(nodes, Setting(512, 0.0005))
    assert found.strategy == "sync"
    assert (
        found.forecasts["sync"].batches_per_s == plan(nodes[:-1], Setting(512, 0.0005)).forecasts["sync"].batches_per_s
    )
    assert list(found.burdens) == [9]
    assert "n9 is of no use" in found.burdens[9]


def test_on_one_machine_nobody_speaks_of_links():
    nodes = [Measured(i, f"n{i}", 5000.0, {"raw": Travel(1e-6, 1e-6)}, is_here=True) for i in (1, 2)]
    found = plan(nodes, Setting(2, 0.01))
    assert found.strategy == "local"
    assert "link" not in found.reason
    assert "not exact" in found.reason


def test_a_slow_node_on_a_quick_link_is_no_burden():
    assert plan([*(node(i) for i in range(1, 4)), node(4, speed=25.0)], SETTING).burdens == {}


def test_every_codec_is_weighed_and_the_quickest_counts():
    found = forecast("sync", [node(1, raw_s=0.36, int4_s=0.05), node(2, raw_s=0.36, int4_s=0.05)], SETTING)
    assert found.by_codec["raw"] < found.by_codec["int4"] == found.batches_per_s


def test_no_prediction_exceeds_what_the_nodes_can_compute():
    for raw_s in (0.0, 0.001, 0.1, 3.0):
        for name in ("sync", "async", "local"):
            assert forecast(name, [node(1, raw_s=raw_s), node(2, 33.0, raw_s)], SETTING).utilisation <= 1.0 + 1e-9


@pytest.mark.parametrize("strategy", ["sync", "async"])
def test_faster_links_never_make_a_prediction_worse(strategy):
    rates = [forecast(strategy, [node(1, raw_s=s), node(2, raw_s=s)], SETTING).batches_per_s for s in (1.0, 0.1, 0.01)]
    assert rates == sorted(rates)


def test_a_ring_is_spoken_of_where_it_wins():
    equal, setting = [node(i, raw_s=0.004) for i in range(1, 9)], Setting(batches_per_step=8, busy_s=0.002)
    found = plan(equal, setting)
    assert ring(equal, setting) == pytest.approx(8 / (1 / 100 + 2 * 7 / 8 * 0.004))
    assert ring(equal, setting) > 1.25 * found.forecasts["sync"].batches_per_s
    assert "--on torchrun" in found.reason


def test_a_ring_waits_for_the_slowest_and_sends_all():
    assert "torchrun" not in plan([node(i) for i in range(1, 5)], SETTING).reason, "sync is nearly as quick"
    assert "torchrun" not in plan([*(node(i) for i in range(1, 4)), node(4, speed=25.0)], SETTING).reason
    assert "torchrun" not in plan([node(i, raw_s=0.36, int4_s=0.05) for i in range(1, 5)], SETTING).reason
    assert "torchrun" not in plan([node(i, raw_s=0.36) for i in range(1, 5)], SETTING).reason, "nor is it quick"


def test_nothing_is_known_of_a_ring_on_one_machine():
    nodes = [Measured(i, f"n{i}", 5000.0, {"raw": Travel(1e-6, 1e-6)}, is_here=True) for i in (1, 2)]
    assert ring(nodes, SETTING) is None
    assert ring([node(1)], SETTING) is None


def test_a_pool_changes_only_for_something_much_better():
    slow = plan([node(i, raw_s=0.36) for i in range(1, 5)], SETTING)
    assert is_better(slow, "sync")
    assert not is_better(slow, "local")
    quick = plan([node(i) for i in range(1, 5)], SETTING)
    assert is_better(quick, "local"), "to be exact, if that costs little"
