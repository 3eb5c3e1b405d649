"""What a connection needs from a network: bytes, both ways. Implemented by TCP (tcp.py) and in memory (memory.py).

What wraps another stream (TLS) keeps these promises too: `send` may take a part, and takes nothing where it has to read
first; bytes that were received but not asked for yet count as input. What replaces one (shared memory for tensors)
carries words over the socket that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Stream(Protocol):
    """One end of a connection. ConnectionLost is the only thing that its methods raise."""

    @property
    def is_closed(self) -> bool: ...  # by this end
    def has_input(self) -> bool: ...  # would `receive_into` return something, or raise, at once?
    def receive_into(self, view: memoryview) -> int: ...  # 0: nothing has come
    def send(self, buffers: Sequence[bytes | memoryview]) -> int: ...  # what was not taken is sent again
    def set_blocking(self, is_blocking: bool) -> None: ...
    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None: ...
    def close(self) -> None: ...
