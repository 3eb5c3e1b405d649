"""What child processes do: coordinate a run, be one of its nodes, or evaluate. Each ends when its parent does."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from types import FrameType

import msgspec
import torch

from wide.config import Options
from wide.errors import UsageError, WideError
from wide.job.definition import Job
from wide.job.loading import load, split_spec
from wide.launch.crew import Crew, LocalNodes, Member
from wide.launch.training import Training
from wide.node.evaluator import Evaluator
from wide.node.greeting import Identity, default_nodes, introduce, pick_device
from wide.node.membership import Membership
from wide.telemetry.log import log, logging_to
from wide.transport.tcp import SILENCE_S

RETRY_S = 60.0  # a node that was paused finds its pool again


def coordinate(
    job: str | bytes, name: str, options: Options, command: list[str], is_relayed: bool, parent: Pipe
) -> None:
    """Train, or plan, and tell the parent how it ended: ("result", JSON) or ("error", exit code, words, traceback).

    A process group of its own: Ctrl-C in the terminal reaches the parent, which passes it on once, as SIGTERM.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()
    signal.signal(signal.SIGTERM, _not_begun)
    if is_relayed:
        sys.stderr = _Relay(parent)
    try:
        answer: tuple[object, ...] = ("result", _train(job, name, options, command))
    except WideError as error:
        answer = ("error", error.exit_code, str(error), error.details)
    except NotBegun as stopped:
        answer = ("error", stopped.exit_code, str(stopped), "")
    except KeyboardInterrupt:
        answer = ("error", 128 + signal.SIGINT, "interrupted", "")
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is over; only the answer is left to be said
    with contextlib.suppress(OSError):  # a parent that was killed hears nothing
        parent.send_bytes(msgspec.json.encode(answer))


class NotBegun(BaseException):
    """A signal came while data and model were being built. No `except Exception` of the user's may keep it."""

    def __init__(self, number: int) -> None:
        super().__init__("interrupted before training began")
        self.exit_code = 128 + number


def _not_begun(number: int, frame: FrameType | None) -> None:
    raise NotBegun(number)


def _train(job: str | bytes, name: str, options: Options, command: list[str]) -> str:
    loaded = _job(job)
    file = split_spec(job)[0] if isinstance(job, str) else None
    training = Training(loaded, name, options, command, file)
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))  # raised amid a fork, it would be lost
    launcher = LocalNodes(job, options, default_nodes(options))
    evaluates = loaded.evaluate is not None and not options.only_plans
    with contextlib.closing(Crew(job, options, launcher, evaluates)) as crew:
        signal.signal(signal.SIGTERM, _not_begun)
        if came:
            _not_begun(came[0], None)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        result = training.train(crew)
        return training.plan_words if options.only_plans else result.to_json()


class _Relay:
    """A stderr for coordinators of notebooks, whose cells the process's own stderr would not reach."""

    def __init__(self, parent: Pipe) -> None:
        self._parent = parent

    def write(self, text: str) -> int:
        self._parent.send_bytes(msgspec.json.encode(("log", text)))
        return len(text)

    def flush(self) -> None:
        """Every write is sent at once."""

    def isatty(self) -> bool:
        return False


def serve_pool(member: Member) -> None:
    """Be a node, or the evaluator, until the coordinator says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    name = f"local-{member.index}" if member.role == "node" else "evaluator"
    with logging_to("verbose" if member.log == "verbose" else "silent"):
        try:
            device = pick_device(member.device, member.index - 1)
            identity = Identity(member.endpoint.token, name, os.getpid(), device, member.role)
            if member.role == "node":
                dial = functools.partial(member.endpoint.dial, SILENCE_S)
                Membership(dial, identity, lambda: _job(member.job)).last(RETRY_S)
            else:
                connection, job = member.endpoint.dial(), _job(member.job)
                torch.set_num_threads(job.threads)
                Evaluator(connection, job, introduce(connection, identity, job.threads)).work()
        except WideError as error:
            log.debug("%s: %s", name, error)
            sys.exit(error.exit_code)


def _job(job: str | bytes) -> Job:
    if isinstance(job, str):
        return load(job)
    import cloudpickle  # from a parent to its own child: the only place where this is allowed

    try:
        loaded: Job = cloudpickle.loads(job)
    except Exception as error:
        raise UsageError(f"the job could not be sent here ({error}): put it into a file of its own") from None
    return loaded


def _end_with_parent() -> None:
    """Should the parent be killed, no child stays behind, not even one deep in a long computation."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), signal.SIGTERM)
