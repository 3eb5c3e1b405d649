"""The door of a pool: who may come in, with which model and which data. Knows tokens and descriptions, no sockets."""

from __future__ import annotations

import hmac
import ipaddress
import socket
from dataclasses import dataclass

from wide.codec.layout import difference
from wide.errors import Refused
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

    def admit(self, hello: Hello) -> None:
        """Whoever has not the right token is refused."""
        expected = self.evaluator_token if hello.role == "evaluator" else self.token
        if not hmac.compare_digest(hello.token.encode(), expected.encode()):
            raise Refused("wrong token: set WIDE_TOKEN, or --token-file, to the token of `wide serve`")
        if hello.role not in ROLES:
            raise Refused(f"there is no role {hello.role[:20]!r} in a pool")

    def is_here(self, hello: Hello, address: str) -> bool:
        """Does it run on this machine? A tunnel from elsewhere ends here too, but says another name."""
        return ipaddress.ip_address(address.rpartition(":")[0]).is_loopback and hello.host == socket.gethostname()

    def check_model(self, ready: Ready, tensors: list[Tensor]) -> None:
        if differs := difference(ready.tensors, tensors):
            raise Refused(f"your model is not the pool's: {differs}; use the same job file and library versions")

    def has_data(self, ready: Ready, samples: int) -> bool:
        """Can it look up samples itself? Otherwise batches are streamed to it, if that is allowed."""
        if ready.samples == samples:
            return True
        if self.data == "local":
            problem = ready.data_problem or f"it has {ready.samples} samples, the pool's {samples}"
            raise Refused(f"your data set is not the pool's ({problem}); or serve with --data stream")
        return False
