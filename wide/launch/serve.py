"""`wide serve`: the coordinator alone, for nodes that are started elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from wide.config import Options
from wide.job.loading import load, split_spec
from wide.launch.local import Run
from wide.launch.processes import warm_up
from wide.launch.result import Result
from wide.launch.token import make_token_file, read_token
from wide.transport.tcp import Listener


def serve(spec: str, options: Options, token_file: str | None) -> Result:
    """Wait for nodes, train with whoever is there, end when the job is done."""
    token = read_token(token_file)
    job = load(spec)
    if job.evaluate is not None:
        warm_up(spec)
    run = Run(job, spec, split_spec(spec)[0].stem, options)
    path: Path | None = Path(token_file) if token_file else None
    if not token:
        token, path = make_token_file(run.dir)

    def announce(listener: Listener, _: Path) -> None:
        where = f"--token-file {path}" if path else "with the same WIDE_TOKEN"
        print(f"waiting for nodes; on each machine, with a copy of {spec} and the token:", file=sys.stderr)
        print(f"  wide join {listener.host}:{listener.port} --job {spec} {where}", file=sys.stderr, flush=True)

    return run.train(announce, token)
