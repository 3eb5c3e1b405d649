"""`wide.run(job, …)`: from a script or a notebook."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from wide.config import resolve
from wide.errors import UsageError
from wide.job.definition import Job
from wide.launch.processes import warm_up
from wide.launch.result import Result


def run(job: Job, **options: Any) -> Result:
    """Same options as `wide run`. The job travels to the node processes by value: lambdas and notebooks are fine."""
    if not isinstance(job, Job):
        raise UsageError(f"wide.run needs a wide.Job, got {type(job).__name__}")
    settings = resolve(options, os.environ)
    if settings.node_count > 0:
        warm_up()
    import cloudpickle

    from wide.launch.local import Run

    script = getattr(sys.modules["__main__"], "__file__", None)
    payload = cloudpickle.dumps(job) if settings.node_count > 0 else b""
    return Run(job, payload, Path(script).stem if script else "notebook", settings).train()
