"""WIIIIIDE: train one PyTorch model on the machines you have, with the same bits from any pool of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from typing import Unpack

    from wide import hf, lightning
    from wide.config import Compress, Data, Log, Robust, Sockets, Strategy, Track
    from wide.errors import (
        Interrupted,
        NotYet,
        Refused,
        TrainingFailed,
        Unreachable,
        UsageError,
        VersionMismatch,
        WideError,
    )
    from wide.job import order, text
    from wide.job.definition import Job, Phase, on_metric, per_epoch, supervised, total
    from wide.job.here import here, log
    from wide.launch.free import local
    from wide.launch.load import Run, load
    from wide.launch.member import member
    from wide.launch.result import Result

__all__ = [
    "Interrupted",
    "Job",
    "NotYet",
    "Phase",
    "Refused",
    "Result",
    "Run",
    "TrainingFailed",
    "Unreachable",
    "UsageError",
    "VersionMismatch",
    "WideError",
    "here",
    "hf",
    "lightning",
    "load",
    "local",
    "log",
    "member",
    "on_metric",
    "order",
    "per_epoch",
    "run",
    "supervised",
    "text",
    "total",
]
__version__ = "0.1.0"

# Looked up when they are needed: `import wide` is quick, so that the command can be stopped from its first moment on.
_HOMES = (
    {"Result": "launch.result"}
    | {"member": "launch.member", "local": "launch.free"}
    | dict.fromkeys(("load", "Run"), "launch.load")
    | dict.fromkeys(("Job", "Phase", "on_metric", "per_epoch", "supervised", "total"), "job.definition")
    | dict.fromkeys(("here", "log"), "job.here")
)
_MODULES = {"order": "wide.job.order", "text": "wide.job.text", "hf": "wide.hf", "lightning": "wide.lightning"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'wide' has no attribute {name!r}")
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    value = globals()[name] = getattr(importlib.import_module(f"wide.{_HOMES.get(name, 'errors')}"), name)
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class RunOptions(TypedDict, total=False):
    """What `wide.run` takes besides the job: the options of the command `wide run`, None for what is not given."""

    nodes: int | None
    strategy: Strategy | None
    steps: int | None
    epochs: float | None
    seconds: float | None
    seed: int | None
    out: Path | str | None
    resume: Path | str | None
    checkpoint_every: float | None
    keep: int | None
    data: Data | None
    compress: Compress | None
    robust: Robust | None
    log: Log | None
    plain: bool | None
    track: Track | None
    device: str | None
    socket: Sockets | str | None
    check: bool | None


def run(
    job: Job | Callable[..., Job],
    *,
    set: Mapping[str, Any] | None = None,  # noqa: A002  (as on the command line)
    **options: Unpack[RunOptions],
) -> Result:
    """Train `job` on this machine and return the result; the options are those of the command `wide run`. A function
    that makes a job is called with its defaults, and what `set` says: `wide.run(job, set={"lr": 0.3})`.
    """
    from wide.launch.local import run_job  # what trains is loaded when it is needed, not by `import wide`

    return run_job(job, set, **options)
