"""WIIIIIDE: train one PyTorch model on the machines you have, with the same bits from any pool of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wide.job import Job, supervised

if TYPE_CHECKING:
    from wide.launch.result import Result

__all__ = ["Job", "run", "supervised"]
__version__ = "0.1.0"


def run(job: Job, **options: Any) -> Result:
    """Train `job` on this machine and return the result; the options are those of the command `wide run`."""
    from wide.launch.local import run_job  # what trains is loaded when it is needed, not by `import wide`

    return run_job(job, **options)
