"""`wide run --on ray`: the way to a Ray cluster, and what the caller wants of it. Knows addresses, the run's folder and
signals; the pool itself is in ray_pool.py.

The coordinator stays on one machine: this one, if it belongs to the cluster, else the one that Ray's client server runs
on. So the run's folder is there whenever Ray starts it again; both sides must see it, which is tried first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec

from wide.config import Options
from wide.errors import Unreachable, VersionMismatch
from wide.job.place import located
from wide.job.spec import parts, split_spec, title_of
from wide.launch.code import code_of
from wide.launch.engines import needs
from wide.launch.folder import RunFolder
from wide.launch.ray_pool import RayPool, Wishes
from wide.launch.result import Result
from wide.launch.served import Errand

HELLO_S = 5.0  # for an address to answer


def run(spec: str, options: Options, address: str) -> Result:
    """Train on the cluster at `address`; if that is empty, on the one that runs here, or that RAY_ADDRESS names."""
    needs("ray", "ray")
    spec = located(spec)
    path, _ = split_spec(spec)
    with contextlib.redirect_stdout(sys.stderr), _connected(address, options) as is_client, Wishes() as wishes:
        folder = RunFolder(options.out, options.resume, title_of(path), path)
        folder.close()  # for the coordinator to take
        there = msgspec.structs.replace(options, out=folder.path.absolute(), resume="auto")
        place = replace(parts(spec), place=str(Path(parts(spec).place).absolute()))
        code = code_of(spec) if is_client else None  # else the coordinator has the file itself
        with contextlib.closing(RayPool(Errand(str(place), there, os.getcwd(), tuple(sys.argv), code), wishes)) as pool:
            return replace(pool.train(), run_dir=str(folder.path))


@contextlib.contextmanager
def _connected(address: str, options: Options) -> Iterator[bool]:
    """By Ray's client, from outside the cluster?"""
    import ray

    named = f"ray://{address}" if address else os.environ.get("RAY_ADDRESS", "")
    _knock(named.removeprefix("ray://"))
    try:
        ray.init(named or "auto", logging_level="error", log_to_driver=options.log == "verbose")
    except (ConnectionError, ValueError) as error:
        if named:
            raise Unreachable(f"the Ray cluster at {named} cannot be used: {_first_line(error)}") from None
        words = "no Ray cluster runs here, and RAY_ADDRESS names none: `ray start --head` starts one"
        raise Unreachable(f"{words}; or say --on ray://HOST:10001") from None
    except RuntimeError as error:
        raise VersionMismatch(f"the Ray cluster{' at ' * bool(named)}{named}: {_first_line(error)}") from None
    try:
        yield named.startswith("ray://")
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), HELLO_S).close()
        except (OSError, OverflowError) as error:
            raise Unreachable(f"no Ray cluster answers at {address}: {error}") from None


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
