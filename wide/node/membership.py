"""Being a member of a pool for as long as it lives: a connection that breaks is made again. Knows sessions and how to
dial; knows no processes.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable

import torch

from wide.errors import (
    ConnectionLost,
    Left,
    NotRepeatable,
    NotShared,
    NotYet,
    OtherSet,
    ParametersMoved,
    TrainingFailed,
    Unreachable,
    WrongPool,
)
from wide.job.definition import Job
from wide.job.program import program_of
from wide.node.beside import Beside
from wide.node.greeting import Identity, introduce
from wide.node.pulse import Pulse
from wide.node.session import Session
from wide.node.workbench import Workbench
from wide.telemetry.log import log
from wide.transport.connection import Connection
from wide.transport.introduction import error_of
from wide.wire import messages as say

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 3.0


class Membership:
    """One machine in one pool. What it has built stays when its connection breaks."""

    def __init__(
        self,
        dial: Callable[[], Connection],
        identity: Identity,
        load: Callable[[], Job],
        spec: str = "",
        workers: int | None = None,  # as the job says
        is_told: Callable[[say.Welcome], None] = lambda welcome: None,  # whenever it was let in
    ) -> None:
        self._dial, self._identity, self._load, self._spec, self._workers = dial, identity, load, spec, workers
        self._is_told = is_told
        self._job: Job | None = None
        self._bench: Workbench | None = None
        self._session: Session | None = None
        self._leaving_why = ""
        self._is_welcome = self._was_welcome = False  # by this connection, by any
        self.batches = self.samples = 0  # that it has handed in, by all connections
        self._may_share = True  # the coordinator's memory, if it runs on this machine
        self._chance = random.SystemRandom()  # the global one is seeded alike on every node

    def close(self) -> None:
        if self._bench is not None:
            self._bench.close()

    def leave(self, why: str) -> None:
        """Called by a signal handler: hand in what is finished, and go."""
        self._leaving_why = why
        if self._session is None:
            raise Left(why)
        self._session.leave(why)

    def last(self, retry_s: float) -> say.Stop:
        """Until the coordinator says stop. If it goes away, look for it for `retry_s`."""
        with contextlib.closing(self):
            return self._stay(retry_s)

    def _stay(self, retry_s: float) -> say.Stop:
        """Nodes do not look for their pool all at once, and do so less and less often. Somebody who takes a call and
        ends it (a tunnel whose far end is gone) is not the coordinator.
        """
        deadline, pause_s, has_told = time.monotonic() + retry_s, FIRST_PAUSE_S, False
        while True:
            try:
                return self._once()
            except OtherSet:
                raise  # not in this process
            except (ConnectionLost, Unreachable, NotYet, WrongPool) as error:
                if isinstance(error, WrongPool) and not self._was_welcome:
                    raise  # a pool that it knew may have made room for another one, and come back
                if self._leaving_why:
                    raise Left(self._leaving_why) from None  # nobody is there who would miss it
                if self._is_welcome:
                    log.warning("%s; looking for it again", error)
                    deadline, pause_s = time.monotonic() + retry_s, FIRST_PAUSE_S
                if retry_s <= 0 or time.monotonic() > deadline:
                    raise
                if not self._was_welcome and not has_told:
                    has_told = True
                    log.warning("%s; waiting for it", error)
            threading.Event().wait(pause_s * self._chance.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _once(self) -> say.Stop:
        """One connection: greet, build what is not built yet, work."""
        self._is_welcome = False
        connection = self._dial()
        try:
            if self._job is None:
                self._job = self._load()
                torch.set_num_threads(self._job.threads)
            welcome = introduce(connection, self._identity, self._job.threads)
            self._is_welcome = self._was_welcome = True
            log.info("let in as node %d (%s)", welcome.node, self._identity.name)
            self._is_told(welcome)
            with Pulse(connection):
                stop = self._work(connection, self._job, welcome)
            if stop.exit_code == NotYet.exit_code:
                raise NotYet(stop.why)
            return stop
        except ConnectionLost as error:
            raise ConnectionLost(f"the coordinator went away: {error}") from None
        finally:
            if self._session is not None:
                self.batches += self._session.batches
                self.samples += self._session.samples
            self._session = None
            connection.close()

    def _work(self, connection: Connection, job: Job, welcome: say.Welcome) -> say.Stop:
        """What fails is told to the coordinator, then raised."""
        try:
            if self._bench is None or not self._bench.is_good_for(welcome):
                self.close()
                program = program_of(self._spec) if self._spec else None
                self._bench = Workbench(job, welcome, self._identity.device, program, self._workers)
                if welcome.checks and job.own_loop is None:
                    self._bench.keep_an_eye()
                if welcome.checks in (1, 2) and job.own_loop is None:
                    self._bench.try_job(is_reversed=welcome.checks == 2)
            self._bench.trainer.steps = welcome.steps
            beside = Beside(self._bench.trainer.layout, welcome.memory if self._may_share else None)
            session = self._session = Session(connection, self._bench, beside)
            return session.work()
        except NotShared:
            self._may_share = False
            raise
        except TrainingFailed as error:
            is_everywhere = isinstance(error, NotRepeatable)
            moved = error.names if isinstance(error, ParametersMoved) else []
            connection.send(say.Failed(0, -1, str(error), error.details, is_everywhere, moved))
            if moved:
                raise NotYet(str(error)) from None  # the pool begins anew, and will know of them
            raise


def raise_for(stop: say.Stop) -> None:
    """A coordinator may say goodbye because something is wrong with us."""
    if stop.exit_code:
        raise error_of(stop)
