"""`wide serve`: the coordinator, for nodes that are started elsewhere; and, if wanted, some nodes here."""

from __future__ import annotations

import contextlib
import ipaddress
import shlex
import socket
import sys
from pathlib import Path

import psutil

from wide.config import Options
from wide.job.loading import load, split_spec
from wide.launch.crew import Crew, LocalNodes
from wide.launch.processes import warm_up
from wide.launch.result import Result
from wide.launch.signals import say_and_end
from wide.launch.token import read_token, token_file_in
from wide.launch.training import Origin, Training

MOST_ADDRESSES = 4


def serve(spec: str, options: Options, token_file: str | None) -> Result:
    """Wait for nodes, train with whoever is there, end when the job is done."""
    token, count = read_token(token_file), options.nodes or 0
    if options.log != "silent" and sys.stderr.isatty():
        print(f"wide: serving {spec}; loading torch and the job …", file=sys.stderr, flush=True)
    job = load(spec)
    if job.evaluate is not None or count:
        warm_up(spec)
    training = Training(job, split_spec(spec)[0].stem, options, Origin(sys.argv, spec, end=say_and_end))
    path: Path | None = Path(token_file) if token_file else None
    if not token:
        token, path = token_file_in(training.dir)
    launcher = LocalNodes(spec, options, count, is_open=True)
    with contextlib.closing(Crew(spec, options, launcher, job.evaluate is not None, token)) as crew:
        where = f"--token-file {shlex.quote(str(path))}" if path else "with the same WIDE_TOKEN"
        print(f"waiting for nodes; on each machine, with a copy of {spec} and the token:", file=sys.stderr)
        listener = crew.listener
        assert listener is not None  # the pool is open
        for address in addresses(listener.host):
            line = f"wide join {address}:{listener.port} --job {shlex.quote(spec)} {where}"
            print(f"  {line}", file=sys.stderr, flush=True)
        return training.train(crew)


def addresses(host: str) -> list[str]:
    """Where others find this machine, if it listens on `host`: for 0.0.0.0 and ::, which mean all, each of its own."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [f"[{host}]" if ":" in host else host]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = []
    for name, interface in psutil.net_if_addrs().items():
        if (state := psutil.net_if_stats().get(name)) is None or not state.isup:
            continue
        for entry in [entry for entry in interface if entry.family == family]:
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append(f"[{address}]" if address.version == 6 else str(address))
    return found[:MOST_ADDRESSES] or ["[::1]" if family == socket.AF_INET6 else "127.0.0.1"]
