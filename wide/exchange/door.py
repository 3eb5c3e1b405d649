"""The door of a pool: who may come in, with which model and which data. Knows tokens and descriptions, no sockets."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass, field

from wide.codec.layout import difference
from wide.errors import Refused
from wide.job.program import Program
from wide.job.program import difference as program_difference
from wide.wire.messages import Hello, Ready, Tensor

ROLES = ("node", "evaluator", "planner")


@dataclass(frozen=True)
class Door:
    """Who may come in, and what they are told."""

    token: str
    evaluator_token: str
    seed: int
    data: str
    compress: str
    build: str  # of this machine; a node that differs may round differently
    program: Program = field(default_factory=dict)  # that the pool trains; empty, if it has no file
    moved: tuple[str, ...] = ()  # parameters that the loss moves
    checks: bool = False  # its first nodes try whether the job gives the same numbers twice

    def admit(self, hello: Hello) -> None:
        """Whoever has not the right token is refused."""
        expected = self.evaluator_token if hello.role == "evaluator" else self.token
        if not hmac.compare_digest(hello.token.encode(), expected.encode()):
            raise Refused("wrong token: set WIDE_TOKEN, or --token-file, to the token of `wide serve`")
        if hello.role not in ROLES:
            raise Refused(f"there is no role {hello.role[:20]!r} in a pool")

    def is_here(self, hello: Hello, address: str) -> bool:
        """Does it run on this machine? A tunnel from elsewhere ends here too, but says another name."""
        host = address.rpartition(":")[0]
        return not host or (ipaddress.ip_address(host).is_loopback and hello.host == socket.gethostname())

    def check_model(self, ready: Ready, tensors: list[Tensor]) -> None:
        if differs := difference(ready.tensors, tensors):
            raise Refused(f"your model is not the pool's: {differs}; use the same job file and library versions")

    def check_program(self, ready: Ready) -> None:
        """A stale copy of a file trains something else without a word."""
        if differs := program_difference(ready.program, self.program):
            raise Refused(f"{differs}; copy the pool's files to this machine")

    def has_data(self, ready: Ready, samples: int, probes: list[tuple[int, str]]) -> bool:
        """Can it look up samples itself? Otherwise batches are streamed to it, if that is allowed. The same number of
        other samples is refused: `probes` are some of ours, empty if a difference would say nothing.
        """
        if ready.samples == samples:
            theirs = dict(ready.probes)
            differ = [number for number, digest in probes if theirs.get(number, digest) != digest]
            if differ:
                raise Refused(
                    f"your data set is not the pool's: sample {differ[0]} differs. The same files, in the same order, "
                    "are needed on every machine, and random numbers from torch's, numpy's or random's own generator"
                )
            return True
        if self.data == "local":
            problem = ready.data_problem or f"it has {ready.samples} samples, the pool's {samples}"
            raise Refused(f"your data set is not the pool's ({problem}); or serve with --data stream")
        return False
