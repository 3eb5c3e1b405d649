"""Every rank but 0: computes its share of what rank 0 orders, and makes the same steps. Writes nothing down."""

from __future__ import annotations

from typing import Any

import torch

from wide.codec.batch import fingerprints
from wide.coordinator.master import Master
from wide.engine.lead import introduction
from wide.engine.replica import Replica
from wide.engine.share import Share, moved
from wide.engine.team import Gone, Team
from wide.errors import ParametersMoved, TrainingFailed, UsageError, WideError
from wide.job.definition import Job
from wide.job.here import Here
from wide.job.model import begun, build_model
from wide.job.samples import Samples
from wide.job.schedule import Schedule


def follow(team: Team, job: Job) -> Master:
    """Until rank 0 says that it is over. What was trained is the same on every rank."""
    told = team.shared()
    torch.set_num_threads(job.threads)
    problem: WideError | None = None
    try:
        samples, schedule, master = _built(job, told)
    except WideError as error:
        problem = error
    team.all_well(problem)
    replica = Replica(job, master, told["seed"], team.device, team.device.type != "cpu")
    share = Share(job, replica, samples, schedule, team, told["steps"])
    team.gathered(introduction())
    rates = len(replica.descent.group_rates) if replica.descent.metric else 0
    while (order := team.hear(rates)) is not None:
        try:
            share.compute(order)
        except (ParametersMoved, TrainingFailed) as error:
            words = moved(error) if isinstance(error, ParametersMoved) else error
            step, low, _ = schedule.stretches(order.first, order.end)[0]
            where = f"step {step.number}, batch {low + share.at}, rank {team.rank}"
            raise TrainingFailed(f"{where}: {words}", error.details) from None
        if not share.is_finite:
            raise Gone("the gradient is not finite")  # rank 0 finds that, too, and tells it
        if share.is_whole:
            share.descend(schedule.step_at(order.first).number + 1)
    return master


def _built(job: Job, told: dict[str, Any]) -> tuple[Samples, Schedule, Master]:
    """The same that rank 0 has; weights come from there."""
    seed, steps = told["seed"], told["steps"]
    samples = Samples(job, seed)
    if len(samples) != told["samples"]:
        raise UsageError(f"the data set has {len(samples)} samples here, and {told['samples']} at rank 0")
    for number, digest in fingerprints(samples.probes(seed)):
        if told["data"].get(str(number), digest) != digest:
            raise UsageError(f"the data set is not rank 0's: sample {number} differs")
    kind = (samples.batch_size, job.batches_per_step, seed, samples.order, samples.drop_last, job.evaluate_every)
    schedule = Schedule(len(samples), *kind)

    def here(step: int) -> Here:
        return Here(step, schedule.step(step).epoch, 0, steps)

    master = Master(job, begun(build_model(job, seed), job.init), seed, here=here)
    master.descent.go_on_from(told["descent"])
    return samples, schedule, master
