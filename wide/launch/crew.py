"""The processes of a pool that run on this machine, and the door they come in by.

Opened before the coordinator starts any thread, because it may have to fork.
"""

from __future__ import annotations

import secrets

import msgspec

from wide.config import Options, Sockets
from wide.launch.processes import GRACE_S, Children
from wide.transport.tcp import Listener


class Member(msgspec.Struct, frozen=True):
    """Everything a node or evaluator process is told. `job` is a file's spec, or a pickled Job if there is no file."""

    role: str
    index: int
    host: str
    port: int
    token: str
    job: str | bytes
    device: str
    log: str
    sockets: Sockets


class Crew:
    """`nodes` node processes (none, if nodes come from elsewhere), and an evaluator if the job evaluates."""

    def __init__(self, job: str | bytes, options: Options, nodes: int, evaluates: bool, token: str = "") -> None:
        self.listener = Listener(options.host, options.port, options.socket)
        self.token = token or secrets.token_hex(16)
        self.evaluator_token = secrets.token_hex(16)
        self.is_local = nodes > 0
        self._job, self._options = job, options
        self._nodes, self._evaluators = Children(), Children()
        for index in range(1, nodes + 1):
            self._start(self._nodes, "node", index, self.token)
        if evaluates:
            self._start(self._evaluators, "evaluator", 0, self.evaluator_token)

    def trouble(self) -> str:
        """Why this pool cannot go on, if it cannot: its own nodes are all gone, and nobody else would come."""
        if not self.is_local or not self._nodes.are_all_gone:
            return ""
        return f"all nodes are gone, their exit codes: {self._nodes.exit_codes()}; --log verbose tells more"

    def close(self) -> None:
        self.listener.close()
        for children in (self._nodes, self._evaluators):
            children.stop(GRACE_S)

    def _start(self, children: Children, role: str, index: int, token: str) -> None:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.listener.host, self.listener.host)
        options = self._options
        member = Member(
            role, index, host, self.listener.port, token, self._job, options.device, options.log, options.socket
        )
        children.start("wide.launch.child", "serve_pool", member)
