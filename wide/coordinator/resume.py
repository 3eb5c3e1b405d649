"""Going on with a run: everything that is put back, in one place. Knows checkpoints, and who needs what of them.

checkpoint ─► options that were not given ─► the same schedule? ─► weights, optimizer ─► ledger ─► pool's position
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from wide.config import Options
from wide.coordinator.events import Position
from wide.coordinator.master import Master
from wide.coordinator.record import Record
from wide.errors import TrainingFailed, UsageError
from wide.job.schedule import Schedule
from wide.store.checkpoint import Checkpoint
from wide.store.state_dict import unpack
from wide.telemetry.log import log
from wide.telemetry.totals import NodeTotals

LENGTHS = ("steps", "epochs", "seconds")  # how long to train is one wish: any of them replaces all
KEPT = ("strategy", "compress", "robust", *LENGTHS)


def asked(seed: int, options: Options) -> dict[str, Any]:
    """What a run remembers of its options."""
    return {"seed": seed} | {name: getattr(options, name) for name in KEPT}


@dataclass(frozen=True)
class Start:
    """Where a run begins: `position`, what the fold remembered, what each node did before."""

    position: Position = field(default_factory=Position)
    fold_state: Any = None
    nodes: list[NodeTotals] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    is_resumed: bool = False  # even if no checkpoint had been written


def remembered(options: Options, asked: Mapping[str, Any], where: str) -> Options:
    """Options that are not given are as they were."""
    before = {name: value for name, value in asked.items() if value is not None and name in ("seed", *KEPT)}
    if any(getattr(options, name) is not None for name in LENGTHS):
        before = {name: value for name, value in before.items() if name not in LENGTHS}
    if options.strategy == "sync":
        before.pop("robust", None)  # it was for another one
    given = {name: getattr(options, name) for name in before if getattr(options, name) is not None}
    if "seed" in before and given.get("seed", before["seed"]) != before["seed"]:
        raise UsageError(f"--seed {given['seed']}: {where} was begun with seed {before['seed']}, and stays with it")
    return msgspec.structs.replace(options, **(before | given))


def check_data(saved: Checkpoint, data: dict[str, str], where: str) -> None:
    """The same samples under the same numbers? Where they can be compared."""
    if differs := differing(saved.state.get("data", {}), data):
        raise UsageError(
            f"sample {differs} is not what it was when {where} was begun: a run goes on with the data that it began "
            "with (is its order that of a set, or of a folder? sort it). Begin a new run, or say --no-check"
        )


def differing(before: Mapping[str, str], data: Mapping[str, str]) -> str:
    """The number of a sample that is not what it was; empty, if all are that can be compared."""
    if before.get("build") != data.get("build"):
        return ""  # on another machine the same sample may round differently
    return next((number for number, digest in data.items() if before.get(number, digest) != digest), "")


def restore(saved: Checkpoint, schedule: Schedule, master: Master, where: str) -> Start:
    """Put weights and optimizer where they were."""
    for name, now in schedule.given.items():
        before = saved.state["schedule"].get(name, now)
        if before != now:
            raise UsageError(f"{where} was begun with {name} {before}, and this job has {now}")
    try:
        position = msgspec.convert(saved.state["position"], Position)
        _restore_weights(saved, master)
        if changed := master.descent.go_on_from(unpack(saved.state["descent"], saved.others)):
            log.warning("the optimizer goes on as it was (%s): begin a new run to change that", changed)
        nodes = [NodeTotals(**totals) for totals in saved.state.get("nodes", ())]
        return Start(position, unpack(saved.state["fold"], saved.others), nodes, saved.state, is_resumed=True)
    except (KeyError, ValueError, TypeError, msgspec.ValidationError) as error:
        raise TrainingFailed(f"the checkpoint of step {saved.step} cannot be understood: {error!r}") from None


def _restore_weights(saved: Checkpoint, master: Master) -> None:
    layout, moved = master.layout, saved.state.get("moved", {})
    constant = {slot.name for slot in layout.constant}
    constant |= {name for name in layout.moved_buffers if name not in moved}  # it was, until now
    with torch.no_grad():
        for name, view in master.named_views:
            kept = saved.others.get(f"model.{name}", saved.model.get(name))
            if kept is None and name in constant:
                continue  # it is as model() has made it
            if kept is None or kept.shape != view.shape or kept.dtype != view.dtype:
                raise TrainingFailed(f"this job's model is not the one that was saved: {name} differs")
            view.copy_(kept)


def length(steps: int | None, start: Position, schedule: Schedule, where: str) -> int | None:
    """How many steps the run has, if it was to have `steps` of them; it may have gone further already."""
    reach = schedule.step_at(start.front - 1).number + 1 if start.front else 0
    if steps is None or steps >= reach:
        return steps
    if start.front != schedule.position(start.steps):
        raise UsageError(f"{steps} steps: {where} is at step {reach} already; say --steps {reach}")
    return start.steps  # all is done


def restore_record(record: Record, start: Start) -> None:
    """Of a run that was begun and never saved, only what it wrote is dropped."""
    if start.is_resumed:
        record.go_on_from(start.position, start.state, {totals.node: totals.part for totals in start.nodes})
