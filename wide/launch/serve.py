"""`wide serve`: the coordinator alone, for nodes that are started elsewhere."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

from wide.config import Options
from wide.job.loading import load, split_spec
from wide.launch.crew import Crew, Elsewhere
from wide.launch.processes import warm_up
from wide.launch.result import Result
from wide.launch.token import read_token, token_file_in
from wide.launch.training import Training


def serve(spec: str, options: Options, token_file: str | None) -> Result:
    """Wait for nodes, train with whoever is there, end when the job is done."""
    token = read_token(token_file)
    job = load(spec)
    if job.evaluate is not None:
        warm_up(spec)
    file = split_spec(spec)[0]
    training = Training(job, file.stem, options, sys.argv, file)
    path: Path | None = Path(token_file) if token_file else None
    if not token:
        token, path = token_file_in(training.dir)

    with contextlib.closing(Crew(spec, options, Elsewhere(), job.evaluate is not None, token)) as crew:
        where = f"--token-file {shlex.quote(str(path))}" if path else "with the same WIDE_TOKEN"
        address = f"{crew.listener.host}:{crew.listener.port}"
        print(f"waiting for nodes; on each machine, with a copy of {spec} and the token:", file=sys.stderr)
        print(f"  wide join {address} --job {shlex.quote(spec)} {where}", file=sys.stderr, flush=True)
        return training.train(crew)
