"""Which strategy suits a pool, by what was measured: a pure function. Knows speeds and seconds, codecs only by name.

What is predicted are batches/s. A node computes `batches_per_s` while all others compute too; its update and the new
weights travel `up_s` and `down_s`, in each codec; the coordinator is busy `busy_s` with each update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from wide.strategy.course import WORTH_OVERLAPPING, round_length

FAITH = 0.9  # sync is exact, and taken if it reaches this much of the quickest
GAIN = 1.1  # local ends nearer to sync than async does, so async must be so much quicker
SUSPECTS = 8  # nodes with the slowest links, that may be a burden
BURDEN = 1.02  # a node is a burden if the others would be so much quicker without it


class Travel(NamedTuple):
    """How long an update, and new weights, are on their way."""

    up_s: float
    down_s: float

    @property
    def both_s(self) -> float:
        return self.up_s + self.down_s


@dataclass(frozen=True)
class Measured:
    """One node: its speed, and what each codec makes of its link."""

    node: int
    name: str
    batches_per_s: float
    travel: dict[str, Travel]


@dataclass(frozen=True)
class Setting:
    """What is the same for all nodes."""

    batches_per_step: int
    busy_s: float


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
    forecasts = {name: forecast(name, nodes, setting) for name in PREDICTIONS}
    best = max(found.batches_per_s for found in forecasts.values())
    picked = "local"
    if forecasts["sync"].batches_per_s >= FAITH * best:
        picked = "sync"
    elif forecasts["async"].batches_per_s > GAIN * forecasts["local"].batches_per_s:
        picked = "async"
    return Plan(picked, _reason(picked, forecasts), forecasts, _burdens(picked, nodes, setting))


def forecast(strategy: str, nodes: list[Measured], setting: Setting) -> Forecast:
    predict = PREDICTIONS[strategy]
    rate = _quickest(strategy, nodes, setting)
    codecs = set.intersection(*(set(node.travel) for node in nodes))
    by_codec = {
        codec: predict(nodes, [node.travel[codec] for node in nodes], setting)
        for codec in nodes[0].travel
        if codec in codecs
    }
    return Forecast(strategy, rate, rate / _speed(nodes), by_codec)


def _sync(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """In each step the slowest link is waited for, and the coordinator takes the updates one after the other."""
    computing_s = setting.batches_per_step / _speed(nodes)
    at_work = min(len(nodes), setting.batches_per_step)
    return setting.batches_per_step / (computing_s + max(t.both_s for t in travel) + at_work * setting.busy_s)


def _async(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """Each node waits for its own link, after leases of half a step's share."""
    rate, leases, speed = 0.0, 0.0, _speed(nodes)
    for node, its in zip(nodes, travel, strict=True):
        lease = max(1.0, setting.batches_per_step * node.batches_per_s / speed / 2)
        lease_s = lease / node.batches_per_s + its.both_s + setting.busy_s
        rate += lease / lease_s
        leases += 1 / lease_s
    return rate / max(1.0, leases * setting.busy_s)


def _local(nodes: list[Measured], travel: list[Travel], setting: Setting) -> float:
    """Where weights and deltas travel for long, nobody waits for them, if they need less time than a round."""
    tick_s = setting.batches_per_step / _speed(nodes)
    slowest_s = max(t.both_s for t in travel)
    round_s = round_length(tick_s, slowest_s) * tick_s
    waited_s = slowest_s if slowest_s <= WORTH_OVERLAPPING * round_s else 0.0
    return _speed(nodes) * round_s / max(round_s + waited_s, slowest_s, len(nodes) * setting.busy_s)


PREDICTIONS: dict[str, Callable[[list[Measured], list[Travel], Setting], float]] = {
    "sync": _sync,
    "async": _async,
    "local": _local,
}


def _best(node: Measured) -> Travel:
    return min(node.travel.values(), key=lambda travel: travel.both_s)


def _quickest(strategy: str, nodes: list[Measured], setting: Setting) -> float:
    """Each link with the codec that suits it."""
    return PREDICTIONS[strategy](nodes, [_best(node) for node in nodes], setting)


def _speed(nodes: list[Measured]) -> float:
    return sum(node.batches_per_s for node in nodes)


def _reason(picked: str, forecasts: dict[str, Forecast]) -> str:
    mine = forecasts[picked]
    others = ", ".join(f"{name} {f.batches_per_s:.3g}" for name, f in forecasts.items() if name != picked)
    why = {
        "sync": "exact, and nearly as quick as any other",
        "async": "links are too slow to wait for all, but quick enough for every update",
        "local": "links, or the coordinator, are too slow for an update of every step",
    }[picked]
    return f"{why}: {mine.batches_per_s:.3g} batches/s, {mine.utilisation:.0%} of what the nodes can compute; {others}"


def _burdens(picked: str, nodes: list[Measured], setting: Setting) -> dict[int, str]:
    """Which nodes slow the pool down."""
    found = {}
    with_all = _quickest(picked, nodes, setting)
    suspects = sorted(nodes, key=lambda node: -_best(node).both_s)[:SUSPECTS] if len(nodes) > 1 else []
    for node in suspects:
        without = _quickest(picked, [other for other in nodes if other is not node], setting)
        if without > BURDEN * with_all:
            found[node.node] = (
                f"{node.name} slows the pool down: {with_all:.3g} batches/s with it, {without:.3g} without"
            )
    return found
