"""What one simulated run is about: the job, the pool and how unkind the world is, all from a seed. Plain numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from wide.config import Options, resolve
from wide.job.schedule import Schedule
from wide.strategy.catalogue import STRATEGIES as CATALOGUE

STRATEGIES = tuple(CATALOGUE)
MOST_NODES = 1000
NEVER_S = 1e9


@dataclass(frozen=True)
class Scenario:
    """`batches_per_s` of an ordinary node; `faults` until the world is kind again."""

    strategy: str
    compress: str
    is_plain: bool  # the optimizer is: parts of a step's gradient may be applied one by one
    may_change: bool  # another strategy may be chosen, by the pool or by who resumes it
    is_open: bool
    evaluates: bool
    schedule: Schedule
    steps: int | None
    seconds: float | None
    save_every_s: float
    nodes: int
    batches_per_s: float
    faults: int
    fault_every_s: float
    audit: float  # of all leases
    lies: float  # of their updates are wrong, where a node is a liar; 0: none is
    spike: range  # the gradients of these batches leap, wherever they are computed
    poison: int  # the batch at this position fails wherever it is computed; -1: none does

    def options(self, strategy: str) -> Options:
        given = {"strategy": strategy, "compress": self.compress, "steps": self.steps, "seconds": self.seconds}
        return resolve(given | {"checkpoint_every": self.save_every_s, "audit": self.audit}, {})

    @property
    def is_exact(self) -> bool:
        """Must it end with the bits of one machine?"""
        is_whole = self.steps is not None and self.seconds is None and self.poison < 0
        is_lossless = self.compress in ("lossless", "none", "lz4", "zstd")
        return self.strategy == "sync" and not self.may_change and is_whole and is_lossless


def draw(chance: random.Random, most_nodes: int = MOST_NODES) -> Scenario:
    """Most pools are small; in one of 400 there may be a thousand nodes."""
    beside = random.Random(chance.getstate()[1][0])  # what came later must not change what seeds mean
    spiky = random.Random(chance.getstate()[1][1])
    is_large = chance.random() < 1 / 400
    nodes = min(most_nodes, round(2 ** chance.uniform(7, 10) if is_large else 2 ** chance.uniform(1, 4.6)))
    batches = max(round(2 ** chance.uniform(4, 7.5)), 2 * nodes if is_large else 0)
    batches_per_step = chance.choice((1, 2, 3, 5, 8, 11, 16)) if nodes < 100 else chance.choice((16, 64, nodes))
    per_epoch = chance.choice((4000, chance.randint(1, batches), chance.randint(1, 3 * batches_per_step)))
    schedule = Schedule(per_epoch, 1, batches_per_step, seed=0)
    lasts_s = chance.uniform(10, 60)  # if nothing went wrong
    has_steps = chance.random() < 0.8
    steps = max(1, schedule.step_at(batches).number)
    audit, lies = beside.choice((0.0, 0.1, 1.0)), beside.choice((0.0, 0.0, 0.02, 0.2, 1.0))
    spike_at, spikes = spiky.randrange(batches), spiky.choice((0, 0, 0, 1, 3, 10))
    faults = chance.randint(20, 150) if not is_large else chance.randint(100, 1000)
    return Scenario(
        strategy=chance.choice(STRATEGIES),
        compress=chance.choice(("lossless", "lossless", "none", "lz4", "zstd", "int8")),
        is_plain=chance.random() < 0.5,
        may_change=chance.random() < 0.3,
        is_open=chance.random() < 0.9,
        evaluates=chance.random() < 0.2,
        schedule=schedule,
        steps=steps if has_steps else None,
        seconds=chance.uniform(0.2, 1.5) * lasts_s if not has_steps or chance.random() < 0.1 else None,
        save_every_s=chance.choice((0.01, 1.0, 10.0, NEVER_S)),
        nodes=nodes,
        batches_per_s=batches / nodes / lasts_s,
        faults=faults,
        fault_every_s=chance.choice((1.0, 2.0, 5.0)) * lasts_s / faults,
        audit=audit,
        lies=lies,
        spike=range(spike_at, spike_at + spikes),
        poison=chance.randrange(batches) if chance.random() < 0.03 else -1,
    )
