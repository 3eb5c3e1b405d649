"""Which faults happen when, from a seed; and how many must have happened. Knows classes of faults and time; nothing of
processes.

A run is made of rounds of about 25 s. In the first part of each only sudden faults happen, so that what follows a kill
can be told from what follows a cut; then come those that last, kills of the coordinator, and more sudden ones.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

FULL_S = 600.0
PLANNED = {  # in FULL_S
    "kill": 72,
    "leave": 44,
    "join": 40,
    "reset": 44,
    "pause": 42,
    "cut": 42,
    "slow": 36,
    "full": 18,
    "coordinator": 14,
}
LEAST = dict.fromkeys(PLANNED, 10) | {"kill": 30}
LEAST_TOTAL = 301
LEAST_MEASURED = {"kill": 10, "cut": 5, "coordinator": 5}  # whose recovery was seen undisturbed
LASTS_S = {"pause": (1.0, 8.0), "cut": (2.0, 12.0), "slow": (2.0, 6.0), "full": (2.0, 4.0), "join": (3.0, 10.0)}
ROUND_S = 25.0
CALM = 0.4  # of a round
LASTING_BEGIN = (0.4, 0.62)  # so that they are over before the next calm
SUDDEN = ("kill", "leave", "join", "reset")
STORMY_PART = 0.25  # of the sudden ones happen among the others


@dataclass(frozen=True, order=True)
class Fault:
    """`pick`, from 0 to 1, says which of the nodes that can be hit then."""

    at_s: float
    kind: str
    pick: float
    lasts_s: float


def schedule(seed: int, seconds: float) -> list[Fault]:
    """In the order of time."""
    draw = random.Random(seed)
    rounds = max(1, round(seconds / ROUND_S))
    round_s = seconds / rounds
    faults = []
    for kind, planned in PLANNED.items():
        count = max(2 if kind == "kill" else 1, round(planned * seconds / FULL_S))
        begun = draw.random()
        for i in range(count):
            places = _rounds_with(kind, i, rounds)
            number = places[int((i + begun) * len(places) / count) % len(places)]
            at_s = (number + _part(kind, i, draw)) * round_s
            shortest, longest = LASTS_S.get(kind, (0.0, 0.0))
            lasts_s = draw.uniform(shortest, max(shortest, min(longest, round_s / 2)))
            faults.append(Fault(at_s, kind, draw.random(), lasts_s))
    return sorted(faults)


def _rounds_with(kind: str, i: int, rounds: int) -> range:
    """A full disk and a killed coordinator would hide each other, and what follows a cut: they have their own rounds,
    which they share now and then. A run of one or two rounds has all in each.
    """
    if rounds < 3 or kind not in ("full", "coordinator"):
        return range(rounds)
    return range(2 if kind == "full" or i % 4 == 1 else 1, rounds, 3)


def _part(kind: str, i: int, draw: random.Random) -> float:
    """Of its round."""
    if kind in SUDDEN:
        is_stormy = i % round(1 / STORMY_PART) == 1
        return draw.uniform(CALM, 0.9) if is_stormy else draw.uniform(0.0, CALM)
    return draw.uniform(*LASTING_BEGIN)


def why_void(faults: Mapping[str, int], measured: Mapping[str, int], seconds: float) -> list[str]:
    """What did not happen, or could not be seen, often enough for a verdict."""
    part = seconds / FULL_S
    reasons = []
    for kind, least in LEAST.items():
        if faults.get(kind, 0) < max(1, int(least * part)):
            reasons.append(f"{kind}: {faults.get(kind, 0)} faults of at least {max(1, int(least * part))}")
    if sum(faults.values()) < int(LEAST_TOTAL * part):
        reasons.append(f"{sum(faults.values())} faults in all, of at least {int(LEAST_TOTAL * part)}")
    for kind, least in LEAST_MEASURED.items():
        if measured.get(kind, 0) < int(least * part):
            reasons.append(f"{kind}: {measured.get(kind, 0)} recoveries seen, of at least {int(least * part)}")
    return reasons
