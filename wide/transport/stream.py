"""What a connection needs from a network: bytes, both ways. Implemented by TCP (tcp.py) and in memory (memory.py).

What wraps another stream (tls.py, paced.py) keeps these promises too: `send` may take a part, and is offered the same
bytes again; bytes that were received but not asked for yet count as input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    """One end of a connection. ConnectionLost is the only thing that its methods raise."""

    @property
    def is_closed(self) -> bool: ...  # by this end
    @property
    def binding(self) -> bytes: ...  # what proofs are bound to: the hash of the certificate; empty if there is none
    def has_input(self) -> bool: ...  # would `receive_into` return something, or raise, at once?
    def receive_into(self, view: memoryview) -> int: ...  # 0: nothing has come
    def send(self, buffers: Sequence[bytes | memoryview]) -> int: ...  # what was not taken is sent again
    def set_blocking(self, is_blocking: bool) -> None: ...
    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None: ...
    def close(self) -> None: ...
