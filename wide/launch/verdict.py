"""What came of computing a run again, in words: what follows, and what does not, whose it was, and from where to go on.
Knows a run's past; computes nothing.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wide.job.spec import parts, split_spec
from wide.launch.past import Past, Row
from wide.store import checkpoint

UPDATE, WEIGHTS, UNCLEAR = "update", "weights", "unclear"


@dataclass(frozen=True)
class Differs:
    """A row of the ledger that does not follow."""

    step: int
    first_batch: int
    last_batch: int
    node: int
    who: str


@dataclass(frozen=True)
class Verdict:
    """What was compared, from which step to which, and what was found. `kind`: an update is not what its batches give;
    or the weights are not what the updates give; or it is not clear which. `good` is the last checkpoint from before.
    """

    schema: str
    run_dir: str
    from_step: int
    to_step: int  # inclusive; the last one that was computed
    rows: int
    follows: bool
    kind: str = ""
    step: int | None = None
    differs: list[Differs] = field(default_factory=list)
    good: str = ""
    words: list[str] = field(default_factory=list)

    @property
    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fault:
    """Where it stops to follow: in these of a step's rows, or, if there are none, in the checkpoint after that step."""

    kind: str
    step: int
    rows: list[Row]


def verdict(schema: str, past: Past, fault: Fault | None, extent: tuple[int, int, int], good: str) -> Verdict:
    first, last, compared = extent
    if fault is None:
        return Verdict(schema, str(past.folder), first, last, compared, follows=True, words=[good])
    differs = [Differs(row.step, row.first, row.last, row.node, past.who(row.node)) for row in fault.rows]
    before = [path for step, path in past.checkpoints if step <= fault.step]
    return Verdict(
        schema,
        str(past.folder),
        first,
        fault.step,
        compared,
        follows=False,
        kind=fault.kind,
        step=fault.step,
        differs=differs,
        good=str(before[-1]) if before else "",
        words=[*_found(fault, first, differs), _way_on(past, before[-1] if before else None)],
    )


def _found(fault: Fault, first: int, differs: list[Differs]) -> list[str]:
    if fault.kind == WEIGHTS and not differs:
        return [
            f"the checkpoint after step {fault.step} does not have the weights that the updates give, and these all "
            "follow: the coordinator's memory, its disk, or its optimizer made something else of them"
        ]
    if fault.kind == WEIGHTS:
        return [
            f"step {fault.step}: none of the updates follows, of {_names(differs)}, and those of step {fault.step - 1} "
            "all did: the weights in between are not what the updates give (the coordinator's memory, or its optimizer)"
        ]
    lines = [
        f"{one.who} merged {_batches(one)} of step {one.step}: its update is not what these batches give"
        for one in differs
    ]
    if fault.kind == UNCLEAR and fault.step == first:
        lines.append(
            "these are all updates of the first step that was computed: it may be this machine, the job's modules or "
            "its data, which are not as they were then"
        )
    elif fault.kind == UNCLEAR:
        lines.append("all of that step is its own, so it may have been sent other weights than the updates before give")
    return lines


def _names(differs: list[Differs]) -> str:
    return ", ".join(dict.fromkeys(one.who for one in differs))


def _batches(one: Differs) -> str:
    return (
        f"batches {one.first_batch}…{one.last_batch}"
        if one.last_batch > one.first_batch
        else f"batch {one.first_batch}"
    )


def _way_on(past: Past, good: Path | None) -> str:
    if good is None:
        return "no checkpoint from before it is kept: begin again"
    latest = shlex.quote(str(good.parent / checkpoint.LATEST))
    spec = shlex.quote(_shown(past.spec))
    return (
        f"the last good checkpoint is {good.name}; to go on from there: echo {good.name} > {latest} && "
        f"wide run {spec} --resume {shlex.quote(str(past.folder))}"
    )


def _shown(spec: str) -> str:
    """As a person would write it."""
    path, name = split_spec(spec)
    place = parts(spec).module or str(path)
    return place if name == "job" else f"{place}:{name}"
