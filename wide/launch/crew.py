"""A pool's door on this machine, and whoever was started to come in by it. Opened before the coordinator starts any
thread, because it may have to fork.

Where nodes come from is a launcher's business: `LocalNodes` starts processes here (`wide serve` none, unless it is told
to). Another engine is another launcher.
"""

from __future__ import annotations

import secrets
from typing import Protocol

import msgspec

from wide.config import Options
from wide.launch.processes import GRACE_S, Children
from wide.transport.endpoint import Endpoint
from wide.transport.tcp import Listener


class Launcher(Protocol):
    """Starts nodes for a pool."""

    is_open: bool  # may others come, too?

    def start(self, endpoint: Endpoint) -> None: ...
    def trouble(self) -> str: ...  # why no node will ever come any more, if so
    def close(self) -> None: ...


class Member(msgspec.Struct, frozen=True):
    """Everything a node or evaluator process is told. `job` is a file's spec, or a pickled Job if there is no file."""

    role: str
    index: int
    endpoint: Endpoint
    job: str | bytes
    device: str
    log: str


class LocalNodes:
    """`count` node processes on this machine; if the pool is open, others may come by themselves."""

    def __init__(self, job: str | bytes, options: Options, count: int, is_open: bool = False) -> None:
        self._job, self._options, self._count, self.is_open = job, options, count, is_open
        self._children = Children()

    def start(self, endpoint: Endpoint) -> None:
        for index in range(1, self._count + 1):
            member = Member("node", index, endpoint, self._job, self._options.device, self._options.log)
            self._children.start("wide.launch.child", "serve_pool", member)

    def trouble(self) -> str:
        if self.is_open or not self._children.are_all_gone:
            return ""
        return f"all nodes are gone, their exit codes: {self._children.exit_codes()}; --log verbose tells more"

    def close(self) -> None:
        self._children.stop(GRACE_S)


class Crew:
    """The listener, the nodes that a launcher starts, and an evaluator if the job evaluates."""

    def __init__(
        self, job: str | bytes, options: Options, launcher: Launcher, evaluates: bool, token: str = ""
    ) -> None:
        self.listener = Listener(options.host, options.port, options.socket)
        self.token, self.evaluator_token = token or secrets.token_hex(16), secrets.token_hex(16)
        self.is_open, self.trouble = launcher.is_open, launcher.trouble
        self._launcher, self._evaluator = launcher, Children()
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.listener.host, self.listener.host)
        launcher.start(Endpoint(host, self.listener.port, self.token, options.socket))
        if evaluates:
            endpoint = Endpoint(host, self.listener.port, self.evaluator_token, options.socket)
            member = Member("evaluator", 0, endpoint, job, "cpu", options.log)
            self._evaluator.start("wide.launch.child", "serve_pool", member)

    def is_evaluator_gone(self) -> bool:
        return self._evaluator.are_all_gone

    def close(self) -> None:
        self.listener.close()
        self._launcher.close()
        self._evaluator.stop(GRACE_S)
