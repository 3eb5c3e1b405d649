"""Loops of the user's own, in a script that is run as it is: how such a script comes to a pool, and the session that
serves its loop from a thread beside it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from wide.config import Options, Sockets
from wide.errors import Left, OtherSet, Refused, TrainingFailed, UsageError, WideError
from wide.job import isa
from wide.job.definition import Job
from wide.job.loading import describe, users_code
from wide.job.place import place_of
from wide.job.script import run_as_main
from wide.job.spec import arguments_of
from wide.launch.instructions import shown
from wide.launch.token import forget_token
from wide.launch.visit import VARIABLE, patiently, target_of, visit
from wide.node.greeting import Identity
from wide.node.membership import Membership, raise_for
from wide.node.own_loop import LoopLoss
from wide.node.turns import Over
from wide.strategy.local import LOCAL
from wide.telemetry.log import log, logging_to
from wide.transport.endpoint import Endpoint
from wide.transport.tcp import SILENCE_S
from wide.wire import messages as say

RETRY_S = 3600.0  # how long a pool is looked for that went away
LEAVE_S = 5.0  # for a goodbye
NOT_EXACT = (
    "wide.local: each node trains by itself, on its own data, and what they have learned is averaged now and then: not "
    "exact, and a node that dies takes its steps since the last meeting along"
)


class Seat(NamedTuple):
    """How a script comes to the pool that it was started for."""

    endpoint: Endpoint
    name: str
    retry_s: float
    tells: bool = False  # nobody else says what happens


_seat: Seat | None = None  # of this process, if it was started by a pool
_was_taken = False
_is_open = False  # is a loop being served?


def checked(job: Job, options: Options) -> Options:
    """What a pool can do whose nodes bring loops; raises for what it cannot."""
    own = job.own_loop
    if own is None:
        if any(getattr(phase.loss, "own_loop", None) for phase in job.phases):
            raise UsageError("wide.member as a phase's loss: its loop computes all steps, so say loss=wide.member")
        return options
    if options.workers or job.workers:
        log.info("a loop of one's own fetches its batches without workers")
    if options.only_plans:
        raise UsageError("wide plan measures a job's loss, and this one has a loop instead: there is nothing to plan")
    if own.every:
        if options.strategy not in (None, LOCAL.name):
            raise UsageError(f"--strategy {options.strategy}: wide.local makes steps of its own, so leave it out")
        return msgspec.structs.replace(options, strategy=LOCAL.name)
    if options.strategy in (LOCAL.name, "auto"):
        raise UsageError(
            f"--strategy {options.strategy}: a loop with wide.member computes gradients: use sync or async; wide.local "
            "is for loops that make steps of their own"
        )
    return options


def run_script(spec: str, seat: Seat) -> None:
    """The user's script, as a node of that pool. Raises in words what ends it."""
    global _seat
    _seat = seat
    place = place_of(spec)
    sys.argv[:] = [str(place.path), *arguments_of(spec)]
    with users_code(f"{place.path.name} failed"):
        try:
            run_as_main(place)
        except SystemExit as end:
            if end.code:
                raise TrainingFailed(f"{place.path.name} ended with sys.exit({end.code!r})") from None
    if not _was_taken:
        raise UsageError(f"{place.path}: it ended, and never came to `with wide.member(…)` or `with wide.local(…)`")


def find_seat(what: str, invite: str | None) -> Seat:
    """As its pool has told this process; else by an invite."""
    global _was_taken
    if _is_open:
        raise UsageError(f"{what} within another one: give all models to one, wide.local({{…}}, […])")
    _was_taken = True
    if _seat is not None and invite is None:
        return _seat
    if invite is None and not os.environ.get(VARIABLE):
        raise UsageError(
            f"{what}: this script is in no pool: start it with `wide run FILE`, or give it an invite: "
            f"{VARIABLE}=wide1_… python FILE"
        )
    name = socket.gethostname()
    target = target_of(invite, None, Sockets())
    forget_token()
    os.environ.pop(VARIABLE, None)
    _, endpoint = patiently(lambda: visit(target, name, "visitor"), RETRY_S)
    return Seat(endpoint, name, RETRY_S, tells=True)


def failed(error: BaseException) -> str:
    """Why a loop was left in the middle."""
    return f"its loop failed: {error if isinstance(error, WideError) else describe(error)}"


def device_of(model: nn.Module) -> torch.device:
    """A loop computes where its model is."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


class Served:
    """A pool's session with a loop, in a thread of its own; the loop hears of it by `turns`."""

    def __init__(self, job: Job, model: nn.Module, loss: LoopLoss, seat: Seat) -> None:
        self.turns, self._own, self._retry_s = loss.turns, loss.own_loop, seat.retry_s
        self.node = 0  # its number in the pool
        identity = Identity(seat.endpoint.credential, seat.name, os.getpid(), device_of(model))
        dial = functools.partial(seat.endpoint.dial, SILENCE_S)
        self._membership = Membership(dial, identity, lambda: job, workers=0, is_told=self._told)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="wide")
        self._threads = job.threads
        self._telling = contextlib.ExitStack()
        if seat.tells:
            self._telling.enter_context(logging_to("normal"))

    def start(self) -> None:
        global _is_open
        _is_open = True
        torch.set_num_threads(self._threads)  # of this thread, as of the other one
        self._thread.start()

    def leave(self, why: str) -> None:
        """A session that waits for work hears it when there is some."""
        self.turns.leave(why)
        self._thread.join(LEAVE_S)

    def close(self) -> None:
        """When it has said goodbye, or was told to."""
        while self._thread.is_alive() and not self.turns.is_left:
            self._thread.join(LEAVE_S)
        global _is_open
        _is_open = False
        log.info("this node gave %s batches", f"{self._membership.batches:,}")
        self._telling.close()

    def _told(self, welcome: say.Welcome) -> None:
        self.node = welcome.node
        if welcome.every == self._own.every:
            return
        if welcome.every is None:
            raise Refused("this pool's job has a loss of its own: lend this machine with `wide join`")
        if not welcome.every or not self._own.every:
            raise Refused("this pool was begun by another script: one has wide.member in it, the other wide.local")
        raise Refused(f"this loop meets the others every {self._own.every} steps, the pool's every {welcome.every}")

    def _serve(self) -> None:
        try:
            stop = self._membership.last(self._retry_s)
            raise_for(stop)
            over = Over(stop.why)
        except OtherSet as other:
            wanted = isa.parse(other.isa)
            how = f": start the script with {shown(wanted)} in its environment" if wanted is not None else ""
            over = Over(str(other), Refused(f"{other}{how}"))
        except Left as left:
            over = Over(str(left), Refused(str(left)))
        except BaseException as error:
            if not isinstance(error, WideError):
                log.exception("the session with the pool failed")
            over = Over(str(error), error)
        self.turns.end(over)
