"""A pool's door on this machine, and whoever was started to come in by it. Opened before the coordinator starts any
thread, because it may have to fork.

Where nodes come from is a launcher's business: `LocalNodes` starts processes here (`wide serve` none, unless it is told
to). Another engine is another launcher.
"""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from wide.config import Options
from wide.exchange.guests import Guests
from wide.launch.processes import GRACE_S, Children
from wide.transport.endpoint import Endpoint
from wide.transport.listener import Listener
from wide.transport.tcp import address_here
from wide.wire.proof import Credential, of_token


class Launcher(Protocol):
    """Starts nodes for a pool."""

    is_open: bool  # may others come, too?
    is_here: bool  # does it start them on this machine?
    may_fork: bool  # from this process?

    def start(self, endpoint: Endpoint) -> None: ...
    def trouble(self) -> str: ...  # why no node will ever come any more, if so
    def are_done(self) -> bool: ...  # have all ended, and one of them well?
    def close(self) -> None: ...


class Member(msgspec.Struct, frozen=True):
    """Everything a node or evaluator process is told. `job` is a file's spec, or a pickled Job if there is no file."""

    role: str
    index: int
    endpoint: Endpoint
    job: str | bytes
    device: str
    log: str
    workers: int | None = None  # None: as the job says
    has_own_loop: bool = False  # the file is a script, to be run


class LocalNodes:
    """`count` node processes on this machine; if the pool is open, others may come by themselves."""

    is_here = True

    def __init__(
        self,
        job: str | bytes,
        options: Options,
        count: int,
        is_open: bool = False,
        may_fork: bool = True,
        have_own_loops: bool = False,
    ) -> None:
        self._job, self._options, self._count, self.is_open = job, options, count, is_open
        self.may_fork = may_fork  # from this process
        self._have_own_loops = have_own_loops
        self._children = Children(may_fork)

    def start(self, endpoint: Endpoint) -> None:
        for index in range(1, self._count + 1):
            options = self._options
            told = (options.device, options.log, options.workers, self._have_own_loops)
            member = Member("node", index, endpoint, self._job, *told)
            # A script may start processes, too: to load its data, say.
            start = functools.partial(self._children.start, may_have_children=self._have_own_loops)
            start("wide.launch.child", "serve_pool", member)

    def trouble(self) -> str:
        if self.is_open or not self._children.are_all_gone:
            return ""
        return f"all nodes are gone, their exit codes: {self._children.exit_codes()}; --log verbose tells more"

    def are_done(self) -> bool:
        return not self.is_open and self._children.are_all_gone and 0 in self._children.exit_codes()

    def close(self) -> None:
        self._children.stop(GRACE_S)


@dataclass(frozen=True)
class PoolDoor:
    """How a pool is entered from outside: where it listens already, by which token (none: a new one), and who may come,
    given that token and the evaluator's.
    """

    listener: Listener | None = None
    token: str = ""
    guests: Callable[[str, str], Guests] = Guests


class Crew:
    """The listeners, the nodes that a launcher starts, and an evaluator if the job evaluates. A pool of this machine
    alone is not to be seen in any network, where that is possible.
    """

    def __init__(
        self, job: str | bytes, options: Options, launcher: Launcher, evaluates: bool, door: PoolDoor | None = None
    ) -> None:
        here, door = address_here(), door or PoolDoor()
        self._here = Listener(here, 0) if here is not None else None
        is_seen = launcher.is_open or not launcher.is_here or self._here is None
        self.listener = door.listener
        if is_seen and self.listener is None:
            self.listener = Listener(options.host, options.port, options.socket)
        token, evaluator = door.token or secrets.token_hex(16), secrets.token_hex(16)
        self.guests = door.guests(token, evaluator)
        self.is_open, self.trouble, self.are_done = launcher.is_open, launcher.trouble, launcher.are_done
        self._launcher, self._evaluator = launcher, Children(launcher.may_fork)
        launcher.start(self._endpoint(launcher.is_here, of_token(token), options))
        if evaluates:
            endpoint = self._endpoint(True, of_token(evaluator, "evaluator"), options)
            member = Member("evaluator", 0, endpoint, job, options.device, options.log)
            self._evaluator.start("wide.launch.child", "serve_pool", member)

    @property
    def listeners(self) -> list[Listener]:
        return [listener for listener in (self._here, self.listener) if listener is not None]

    def _endpoint(self, is_here: bool, credential: Credential, options: Options) -> Endpoint:
        """For a node on this machine, or elsewhere."""
        listener = self._here if is_here and self._here is not None else self.listener
        assert listener is not None
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(listener.host, listener.host)
        return Endpoint(((host, listener.port),), credential, b"", options.socket)

    def is_evaluator_gone(self) -> bool:
        return self._evaluator.are_all_gone

    def close(self) -> None:
        for listener in self.listeners:
            listener.close()
        self._launcher.close()
        self._evaluator.stop(GRACE_S)
