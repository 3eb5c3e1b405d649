"""What a child process does: be a node, or the evaluator, of the pool whose address it was given."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

import msgspec
import torch

from wide.errors import ConnectionLost, WideError
from wide.job.definition import Job
from wide.job.loading import load
from wide.node.evaluator import Evaluator
from wide.node.worker import Identity, introduce, lend, pick_device
from wide.telemetry.log import log, logging_to
from wide.transport.connection import Connection
from wide.transport.tcp import connect


class Child(msgspec.Struct, frozen=True):
    """Everything a child is told. `job` is a file's spec, or a pickled Job when there is no file (a notebook)."""

    role: str
    index: int
    host: str
    port: int
    token: str
    job: str | bytes
    device: str
    log: str


def main(child: Child) -> None:
    """Run until the coordinator says stop, or is gone. Ctrl-C is the parent's business."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name = f"local-{child.index}" if child.role == "node" else "evaluator"
    with logging_to("verbose" if child.log == "verbose" else "silent"):
        try:
            connection = Connection(connect(child.host, child.port))
            identity = Identity(child.token, name, os.getpid(), pick_device(child.device, child.index - 1), child.role)
            if child.role == "node":
                lend(connection, identity, lambda: _job(child.job))
            else:
                _evaluate(connection, identity, _job(child.job))
        except ConnectionLost as error:
            log.debug("%s: %s", name, error)
            sys.exit(error.exit_code)
        except WideError as error:
            log.debug("%s: %s", name, error)
            sys.exit(error.exit_code)


def _evaluate(connection: Connection, identity: Identity, job: Job) -> None:
    torch.set_num_threads(job.threads)
    Evaluator(connection, job, introduce(connection, identity, job.threads)).work()


def _job(job: str | bytes) -> Job:
    if isinstance(job, str):
        return load(job)
    import cloudpickle  # from a parent to its own child: the only place where this is allowed

    loaded: Job = cloudpickle.loads(job)
    return loaded


def _end_with_parent() -> None:
    """Should the parent be killed, no child stays behind, not even one deep in a long computation."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
