"""The command that writes a pool as files for an engine: launch."""

from __future__ import annotations

import argparse
import os
from typing import Any

from wide.config import resolve

OPTIONS = ("nodes", "cpus_per_node", "gpus_per_node", "partition", "out", "device", "workers")


def add_launch(commands: Any, set_help: str) -> None:
    command = commands.add_parser("launch", help="a pool as files for slurm, k8s or compose, to read and apply")
    command.add_argument(
        "kind", metavar="slurm|k8s|compose", choices=("slurm", "k8s", "compose"), help="for which engine"
    )
    command.add_argument("job", metavar="JOB", help="file.py, file.py:name or package.module; behind --: its arguments")
    command.add_argument("--nodes", metavar="N", help="nodes (default: 4)")
    command.add_argument("--cpus-per-node", metavar="C", help="cores for each node (default: 1)")
    command.add_argument("--gpus-per-node", metavar="G", help="GPUs for each node (default: 0)")
    command.add_argument("--partition", metavar="P", help="with slurm: the partition")
    command.add_argument("--image", metavar="IMAGE", help="with k8s and compose (default: wiiiiide:VERSION)")
    command.add_argument("--out", metavar="DIR", help="where the files go (default: wide-JOB-KIND)")
    command.add_argument("--set", metavar="NAME=VALUE", action="append", help=set_help)
    command.add_argument("--device", metavar="auto|cpu|cuda:0|mps", help="where nodes compute (default: auto)")
    command.add_argument("--workers", metavar="N", help="processes for each node that fetch batches ahead")
    command.set_defaults(call=launch)


def launch(arguments: argparse.Namespace) -> int:
    options = resolve({name: getattr(arguments, name) for name in OPTIONS}, _environment())
    from wide.launch.writing import IMAGE, Wanted
    from wide.launch.writing import launch as written

    wanted = Wanted(arguments.job, options, tuple(arguments.set or ()), arguments.image or IMAGE)
    print(written(arguments.kind, wanted), flush=True)
    return 0


def _environment() -> dict[str, str]:
    """Of WIDE_… only what means something here."""
    names = [f"WIDE_{name.upper()}" for name in OPTIONS]
    return {name: os.environ[name] for name in names if name in os.environ}
