"""What one simulated run is about: the job, the pool and how unkind the world is, all from a seed. Plain numbers."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from wide.coordinator.events import Position
from wide.coordinator.state import Pool
from wide.job.schedule import Schedule

STRATEGIES = ("sync", "async", "local")
MOST_NODES = 1000


@dataclass(frozen=True)
class Scenario:
    """`batches_per_s` of an ordinary node; `faults` until the world is kind again."""

    strategy: str
    is_eager: bool
    may_change: bool  # another strategy may be chosen, by the pool or by who resumes it
    is_open: bool
    schedule: Schedule
    steps: int | None
    seconds: float | None
    save_every_s: float
    nodes: int
    batches_per_s: float
    faults: int
    fault_every_s: float
    poison: int  # the batch at this position fails wherever it is computed; -1: none does

    def pool(self, strategy: str, start: Position | None) -> Pool:
        return Pool(
            self.schedule,
            self.steps,
            self.seconds,
            self.is_open,
            strategy,
            self.is_eager,
            start,
            save_every_s=self.save_every_s,
        )


def draw(chance: random.Random, most_nodes: int = MOST_NODES) -> Scenario:
    """Most pools are small; in one of 400 there may be a thousand nodes."""
    is_large = chance.random() < 1 / 400
    nodes = min(most_nodes, round(2 ** chance.uniform(7, 10) if is_large else 2 ** chance.uniform(1, 5.6)))
    batches = max(round(2 ** chance.uniform(4, 8)), 2 * nodes if is_large else 0)
    batches_per_step = chance.choice((1, 2, 3, 5, 8, 11, 16)) if nodes < 100 else chance.choice((16, 64, nodes))
    per_epoch = chance.choice((10**6, chance.randint(1, batches), chance.randint(1, 3 * batches_per_step)))
    schedule = Schedule(per_epoch, 1, batches_per_step, seed=0)
    lasts_s = chance.uniform(10, 100)  # if nothing went wrong
    has_steps = chance.random() < 0.8
    steps = max(1, schedule.step_at(batches).number)
    faults = chance.randint(20, 300) if not is_large else chance.randint(100, 1000)
    return Scenario(
        strategy=chance.choice(STRATEGIES),
        is_eager=chance.random() < 0.5,
        may_change=chance.random() < 0.3,
        is_open=chance.random() < 0.9,
        schedule=schedule,
        steps=steps if has_steps else None,
        seconds=chance.uniform(0.2, 1.5) * lasts_s if not has_steps or chance.random() < 0.1 else None,
        save_every_s=chance.choice((0.0, 1.0, 10.0, math.inf)),
        nodes=nodes,
        batches_per_s=batches / nodes / lasts_s,
        faults=faults,
        fault_every_s=chance.choice((1.0, 2.0, 5.0)) * lasts_s / faults,
        poison=chance.randrange(batches) if chance.random() < 0.03 else -1,
    )
