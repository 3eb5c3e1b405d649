"""What child processes do: coordinate a run, be one of its nodes, or evaluate. Each ends when its parent does."""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from typing import Any, NoReturn

import msgspec
import torch

from wide.config import Options, usable_cores
from wide.errors import NotYet, UsageError, WideError
from wide.job.definition import Job
from wide.job.loading import load, values_of
from wide.job.settings import use_settings
from wide.launch.crew import Crew, LocalNodes, Member
from wide.launch.processes import CONTEXT, HAS_FORKSERVER
from wide.launch.relay import Relay
from wide.launch.signals import BEFORE, on_signals
from wide.launch.training import Origin, Training
from wide.node.evaluator import Evaluator
from wide.node.greeting import Identity, default_nodes, introduce, pick_device
from wide.node.membership import Membership
from wide.telemetry.log import log, logging_to
from wide.transport.endpoint import Endpoint
from wide.transport.tcp import SILENCE_S

NOTEBOOK = "notebook"  # a job that has no name there
_unpickled: tuple[bytes, tuple[Job, dict[str, Any]]] | None = None
RETRY_S = math.inf  # a node of our own ends with its coordinator, however long that opens its data


def coordinate(
    job: str | bytes,
    name: str,
    options: Options,
    command: list[str],
    spec: str,
    parent: Pipe,
    listener: Pipe | None,
    screen: Pipe | None,
) -> None:
    """Train, or plan, and tell the parent how it ended: ("result", JSON) or ("error", exit code, words, traceback).

    `listener` is where the parent hears what is said meanwhile, if this process's own stderr is not the place;
    `screen` where it looks at pictures of the run, if it shows any. A process group of its own: Ctrl-C in the terminal
    reaches the parent, which passes it on once, as SIGTERM.
    """
    if hasattr(os, "setpgrp"):
        os.setpgrp()

    def end(number: int, why: str) -> NoReturn:
        """The signal that this process gets stands for the one that its parent got."""
        with contextlib.suppress(OSError):
            parent.send_bytes(msgspec.json.encode(("error", 128 + number, why, "")))
        os._exit(128 + number)

    on_signals(lambda number, frame: end(number, BEFORE))
    relay = Relay(listener, screen) if listener is not None else None
    if relay is not None:
        sys.stderr = relay
    try:
        post = relay.post if relay is not None and screen is not None else None
        variable = "job" if spec or name == NOTEBOOK else name
        ready, values = _loaded(job)
        origin = Origin(command, spec, isinstance(job, bytes), end, post, variable, values)
        training = Training(ready, name, options, origin)

        def loaded() -> None:
            with contextlib.suppress(OSError):  # killed meanwhile: this process is about to notice, too
                parent.send_bytes(msgspec.json.encode(("loaded",)))

        answer: tuple[object, ...] = ("result", _train(training, job, options, loaded, relay))
    except WideError as error:
        answer = ("error", error.exit_code, str(error), error.details)
    except KeyboardInterrupt:
        answer = ("error", 128 + signal.SIGINT, "interrupted", "")
    on_signals(signal.SIG_IGN)  # it is over; only the answer is left to be said
    if relay is not None:
        relay.finish()
    with contextlib.suppress(OSError):  # a parent that was killed hears nothing
        parent.send_bytes(msgspec.json.encode(answer))


def _train(
    training: Training, job: str | bytes, options: Options, loaded: Callable[[], None], relay: Relay | None
) -> str:
    evaluates = training.job.evaluate is not None and not options.only_plans
    with contextlib.ExitStack() as stack:

        def gather() -> Crew:
            """The data set first: nodes that are forked from here find it in their memory."""
            with _ending_with_parent():
                may_fork = training.open_ahead() if HAS_FORKSERVER else True
            loaded()
            has_loop = training.job.own_loop is not None
            launcher = LocalNodes(job, options, default_nodes(options), may_fork=may_fork, have_own_loops=has_loop)
            crew = stack.enter_context(contextlib.closing(Crew(job, options, launcher, evaluates)))
            threading.Thread(target=end_with_parent, daemon=True).start()
            if relay is not None:
                relay.start()
            return crew

        result = training.train(gather)
        return training.plan_words if options.only_plans else result.to_json()


@contextlib.contextmanager
def _ending_with_parent() -> Iterator[None]:
    """While the block runs, and not a moment longer: afterwards this process has to be free of threads."""
    ours, theirs = CONTEXT.Pipe()
    thread = threading.Thread(target=end_with_parent, kwargs={"unless": ours}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        theirs.close()
        thread.join()
        ours.close()


def serve_pool(member: Member) -> None:
    """Be a node, or the evaluator, until the coordinator says stop or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_parent, daemon=True).start()
    with contextlib.suppress(AttributeError, OSError):  # not every system has it, or allows it
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # do not cut in on the coordinator that wakes us
    name = f"local-{member.index}" if member.role == "node" else "evaluator"
    log.handlers.clear()  # the coordinator's, if this process was forked from it
    with logging_to("verbose" if member.log == "verbose" else "silent"):
        try:
            if member.has_own_loop and isinstance(member.job, str):
                from wide.launch.own_loops import Seat, run_script

                if member.index > 1 and member.log != "verbose":
                    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (one of them is enough to be read)
                return run_script(member.job, Seat(member.endpoint, name, RETRY_S))
            device = pick_device(member.device, member.index - 1)
            identity = Identity(member.endpoint.credential, name, os.getpid(), device, member.role)
            if member.role == "node":
                dial = functools.partial(member.endpoint.dial, SILENCE_S)
                Membership(dial, identity, lambda: _job(member.job), workers=member.workers).last(RETRY_S)
            else:
                _evaluate(member.endpoint, identity, _job(member.job))
        except WideError as error:
            log.debug("%s: %s", name, error)
            if member.has_own_loop:  # nobody else has seen its script fail
                print(f"wide: {name}: {error}", file=sys.stderr, flush=True)
            sys.exit(error.exit_code)
    return None


def _evaluate(endpoint: Endpoint, identity: Identity, job: Job) -> None:
    """Until the run is over; should it begin anew, so does this."""
    # What only people look at may round in another way; what training depends on must not.
    torch.set_num_threads(job.threads if job.is_judged else max(job.threads, usable_cores()))
    code = NotYet.exit_code
    while code == NotYet.exit_code:
        with contextlib.closing(endpoint.dial()) as connection:
            welcome = introduce(connection, identity, job.threads)
            code = Evaluator(connection, job, welcome, identity.device).work().exit_code


def _job(job: str | bytes) -> Job:
    return _loaded(job)[0]


def _loaded(job: str | bytes) -> tuple[Job, dict[str, Any]]:
    """And the values that it was made with. Those who were forked from a process that has it need not unpickle it
    again: its memory is shared.
    """
    global _unpickled
    if isinstance(job, str):
        return load(job), values_of(job)
    if _unpickled is not None and _unpickled[0] is job:
        return _unpickled[1]
    from wide.launch.sent import received  # cloudpickle is for those who need it

    try:
        wanted, loaded, values = received(job)
    except Exception as error:
        raise UsageError(f"the job could not be sent here ({error}): put it into a file of its own") from None
    if wanted:
        use_settings(wanted)
    ready: tuple[Job, dict[str, Any]] = loaded, values
    _unpickled = job, ready
    return ready


def end_with_parent(grace_s: float | None = None, unless: Pipe | None = None) -> None:
    """Should the parent be killed, no child stays behind, not even one deep in a long computation. What catches the
    signal has so long to end by itself. Whoever closes the other end of `unless` ends the watch instead.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        if parent.sentinel not in wait([parent.sentinel, *([unless] if unless is not None else [])]):
            return
        os.kill(os.getpid(), signal.SIGTERM)
        if grace_s is not None:
            time.sleep(grace_s)
            os._exit(128 + signal.SIGTERM)
