"""The door of a pool: who may come in, with which model and which data. Knows guests and descriptions, no sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from wide.codec.layout import difference
from wide.errors import OtherProgram, Refused
from wide.exchange.guests import Guests
from wide.exchange.likeness import Likeness
from wide.job.program import Program
from wide.job.program import difference as program_difference
from wide.wire.messages import Hello, Offer, Ready, Tensor
from wide.wire.proof import Credential

ROLES = ("node", "evaluator", "planner", "guest", "visitor")


@dataclass(frozen=True)
class Door:
    """Who may come in, and what they are told."""

    guests: Guests
    seed: int
    data: str
    compress: str
    build: str  # of this machine; a node that differs may round differently
    program: Program = field(default_factory=dict)  # that the pool trains; empty, if it has no file
    moved: tuple[str, ...] = ()  # parameters that the loss moves
    checks: bool = False  # its first nodes try whether the job gives the same numbers twice
    is_open: bool = False  # nodes may come from anywhere, with data of their own
    offer: Offer | None = None  # what visitors are shown, and
    code: bytes = b""  # its payload
    steps: int | None = None  # that the run will have
    every: int | None = None  # steps of a node's own loop, if nodes bring one
    likeness: Likeness | None = None  # what all must have in common; None: nothing

    def admit(self, hello: Hello, nonces: tuple[bytes, bytes] | None, binding: bytes, wall: float) -> Credential:
        """Whoever does not know the right secret is refused."""
        if hello.role not in ROLES:
            raise Refused(f"there is no role {hello.role[:20]!r} in a pool")
        return self.guests.admit(hello, nonces, binding, wall)

    def is_here(self, hello: Hello, is_own: bool) -> bool:
        """Does it run on this machine? A tunnel from elsewhere ends here too, but says another name."""
        return is_own and hello.host == socket.gethostname()

    def check_model(self, ready: Ready, tensors: list[Tensor]) -> None:
        if differs := difference(ready.tensors, tensors):
            raise Refused(f"your model is not the pool's: {differs}; use the same job file and library versions")

    def check_program(self, ready: Ready) -> None:
        """A stale copy of a file trains something else without a word."""
        if differs := program_difference(ready.program, self.program):
            raise OtherProgram(f"{differs}; copy the pool's files to this machine, or join without --job")

    def has_data(self, ready: Ready, samples: int, probes: list[tuple[int, str]]) -> tuple[bool, str]:
        """Can it look up samples itself? Otherwise batches are streamed to it, if that is allowed; and why. `probes`
        are some samples of ours, empty if a difference would say nothing.
        """
        problem, is_other = ready.data_problem, False
        if ready.samples == samples:
            theirs = dict(ready.probes)
            differ = [number for number, digest in probes if theirs.get(number, digest) != digest]
            if not differ:
                return True, ""
            problem, is_other = f"sample {differ[0]} differs", not self.is_open  # our own nodes have the same files
        elif ready.samples is not None:
            problem = f"it has {ready.samples} samples, the pool's {samples}"
        if self.data == "local" or is_other:
            raise Refused(
                f"your data set is not the pool's: {problem}. The same files, in the same order, are needed on every "
                "machine, and random numbers from torch's, numpy's or random's own generator; or serve with --data auto"
            )
        return False, problem
