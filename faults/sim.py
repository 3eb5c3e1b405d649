"""`sim`: thousands of schedules of unkind worlds against the whole coordinator, on all cores; then bugs are planted in
it, and all of them have to be found.

    python -m benchmarks sim                  10,000 schedules
    python -m benchmarks sim --seed 123       one of them, event by event
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from faults.invariants import Violation
from faults.planted import PLANTED, caught
from faults.scenario import STRATEGIES
from faults.simulator import World

SCHEDULES = 10_000
CHUNK = 10
TOLD_EVERY = 1000
LAST_WORDS = 30  # lines of a failing schedule's log; --seed tells all


class Outcome(NamedTuple):
    seed: int
    strategy: str
    nodes: int  # at once
    faults: int
    events: int
    problem: str


def run(
    repeats: int, say: Callable[[str], None], schedules: int = SCHEDULES, seed: int | None = None
) -> dict[str, Any]:
    if seed is not None:
        return _replay(seed, say)
    began = time.perf_counter()
    with multiprocessing.get_context("forkserver").Pool() as processes:
        outcomes = list(_told(processes.imap_unordered(play, range(schedules), CHUNK), say))
        seconds = time.perf_counter() - began
        found = dict(zip(PLANTED, processes.map(caught, PLANTED, 1), strict=True))
    _tell(outcomes, found, say)
    return {
        "schedules": len(outcomes),
        "nodes_max": max(outcome.nodes for outcome in outcomes),
        "faults": sum(outcome.faults for outcome in outcomes),
        "events": sum(outcome.events for outcome in outcomes),
        "seconds": seconds,
        "violations": sum(bool(outcome.problem) for outcome in outcomes),
        "planted": len(found),
        "planted_caught": sum(seed is not None for seed in found.values()),
    }


def play(seed: int) -> Outcome:
    """One schedule."""
    world, problem = World(seed), ""
    try:
        world.run()
    except Violation as violation:
        problem = violation.message
    return Outcome(seed, world.scenario.strategy, world.most_nodes, world.faults, world.events, problem)


def told(seed: int) -> list[str]:
    """All that happens in one schedule, to its end or to what must not be."""
    log: list[str] = []
    try:
        World(seed, log=log).run()
    except Violation as violation:
        log.append(f"VIOLATION  {violation}")
    return log


def _replay(seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    log = told(seed)
    say("\n".join(log))
    return {"seed": seed, "violation": log[-1] if log[-1].startswith("VIOLATION") else ""}


def _told(outcomes: Iterable[Outcome], say: Callable[[str], None]) -> Iterable[Outcome]:
    """As they come, with a word now and then."""
    for number, outcome in enumerate(outcomes, 1):
        if outcome.problem:
            say(f"VIOLATION  seed {outcome.seed}: {outcome.problem}")
        if number % TOLD_EVERY == 0:
            say(f"{number:,} schedules")
        yield outcome


def _tell(outcomes: list[Outcome], found: dict[str, int | None], say: Callable[[str], None]) -> None:
    say(f"{'begins as':>10} {'schedules':>10} {'most nodes':>11} {'faults':>10} {'events':>11} {'violations':>11}")
    for name in STRATEGIES:
        of_it = [outcome for outcome in outcomes if outcome.strategy == name]
        most, faults = max((o.nodes for o in of_it), default=0), sum(o.faults for o in of_it)
        events, violations = sum(o.events for o in of_it), sum(bool(o.problem) for o in of_it)
        say(f"{name:>10} {len(of_it):>10,} {most:>11,} {faults:>10,} {events:>11,} {violations:>11,}")
    for name, seed in found.items():
        say(f"planted: {name.replace('_', ' '):<40} " + (f"seed {seed}" if seed is not None else "NOT FOUND"))
    failing = min((outcome.seed for outcome in outcomes if outcome.problem), default=None)
    if failing is not None:
        say("\n".join(["…", *told(failing)[-LAST_WORDS:], f"all of it: python -m benchmarks sim --seed {failing}"]))
