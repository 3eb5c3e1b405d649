"""Which strategy suits a pool, by what was measured: a pure function. Knows speeds and seconds, codecs only by name.

What is predicted are batches/s. A node computes `batches_per_s` while all others compute too; its update and the new
weights travel `up_s` and `down_s`, in each codec; the coordinator is busy `busy_s` with each update.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from wide.strategy.catalogue import EXACT, STRATEGIES
from wide.strategy.description import Measured, Setting, Travel, speed

SUSPECTS = 8  # nodes with the slowest links, that may be a burden
WORTH_A_RING = 1.25  # so much quicker than sync must an all-reduce be, to be spoken of; and
QUICK = 0.5  # of what the nodes can compute it must give
DENSE = "raw"  # the codec that sends numbers as they are
BURDEN = 1.02  # a node is a burden if the others would be so much quicker without it


class Forecast(NamedTuple):
    """What one strategy would give, each link with the quickest of its codecs."""

    strategy: str
    batches_per_s: float
    utilisation: float  # of what the nodes could compute if they never had to wait
    by_codec: dict[str, float]  # batches/s, if all links used that one


@dataclass(frozen=True)
class Plan:
    """What to do, why, and what was weighed."""

    strategy: str
    reason: str
    forecasts: dict[str, Forecast]
    burdens: dict[int, str]  # nodes that slow this strategy down, and how much


def plan(nodes: list[Measured], setting: Setting) -> Plan:
    """Call with at least one node that was measured."""
    forecasts = {name: forecast(name, nodes, setting) for name in STRATEGIES}
    best = max(found.batches_per_s for found in forecasts.values())
    picked = next(
        name for name, strategy in STRATEGIES.items() if forecasts[name].batches_per_s >= strategy.enough * best
    )
    is_one_machine = all(node.is_here for node in nodes)
    reason = _reason(picked, forecasts, is_one_machine) + _ring_words(nodes, setting, forecasts[EXACT.name])
    return Plan(picked, reason, forecasts, _burdens(picked, nodes, setting))


def forecast(strategy: str, nodes: list[Measured], setting: Setting) -> Forecast:
    predict = STRATEGIES[strategy].forecast
    rate = _quickest(strategy, nodes, setting)
    codecs = set.intersection(*(set(node.travel) for node in nodes))
    by_codec = {
        codec: predict(nodes, [node.travel[codec] for node in nodes], setting)
        for codec in nodes[0].travel
        if codec in codecs
    }
    return Forecast(strategy, rate, rate / speed(nodes), by_codec)


def _best(node: Measured) -> Travel:
    return min(node.travel.values(), key=lambda travel: travel.both_s)


def _quickest(strategy: str, nodes: list[Measured], setting: Setting) -> float:
    """Each link with the codec that suits it."""
    return STRATEGIES[strategy].forecast(nodes, [_best(node) for node in nodes], setting)


def _reason(picked: str, forecasts: dict[str, Forecast], is_one_machine: bool) -> str:
    mine = forecasts[picked]
    others = ", ".join(f"{name} {_plain(f.batches_per_s)}" for name, f in forecasts.items() if name != picked)
    rate = f"{_plain(mine.batches_per_s)} batches/s, {mine.utilisation:.0%} of what the nodes can compute"
    why = STRATEGIES[picked].why_here if is_one_machine else STRATEGIES[picked].why
    return f"{why}: {rate}; {others}"


def ring(nodes: list[Measured], setting: Setting) -> float | None:
    """Batches/s of a dense all-reduce (torch.distributed), if nodes reach each other as they reach the coordinator:
    equal shares of a step, then each link carries 2·(n-1)/n of an update, both ways at once. None: that is not known,
    of nodes on one machine, or where nobody measured an update as it is.
    """
    if len(nodes) < 2 or any(node.is_here or DENSE not in node.travel for node in nodes):
        return None
    count = len(nodes)
    compute_s = math.ceil(setting.batches_per_step / count) / min(node.batches_per_s for node in nodes)
    link_s = max(max(node.travel[DENSE]) for node in nodes)
    return setting.batches_per_step / (compute_s + 2 * (count - 1) / count * link_s)


def _ring_words(nodes: list[Measured], setting: Setting, exact: Forecast) -> str:
    """Where the network is quick, and a ring trains as sync does, but quicker."""
    rate = ring(nodes, setting)
    if rate is None or rate < QUICK * speed(nodes) or rate < WORTH_A_RING * exact.batches_per_s:
        return ""
    what = f"a dense all-reduce, one step after the other as {exact.strategy}, would make about {_plain(rate)}"
    return f"; {what}, if these machines reach each other and none of them leaves: --on torchrun"


def _burdens(picked: str, nodes: list[Measured], setting: Setting) -> dict[int, str]:
    """Which nodes slow the pool down."""
    found = {}
    with_all = _quickest(picked, nodes, setting)
    suspects = sorted(nodes, key=lambda node: -_best(node).both_s)[:SUSPECTS] if len(nodes) > 1 else []
    for node in suspects:
        without = _quickest(picked, [other for other in nodes if other is not node], setting)
        if picked == EXACT.name and without >= with_all:
            found[node.node] = f"{node.name} is of no use: its link is so slow that the others do its part sooner"
        elif without > BURDEN * with_all:
            found[node.node] = (
                f"{node.name} slows the pool down: {_plain(with_all)} batches/s with it, {_plain(without)} without"
            )
    return found


def _plain(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"
