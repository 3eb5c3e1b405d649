"""The in-memory twin of TCP, with scripted faults: two ends in one process, no system calls, no time of its own.

`pair` connects two ends directly. A `MemoryHub` is what a coordinator waits at: `pass_time` lets the rest of a
simulated world go on until somebody has something to say, or the time is over, and says how long that was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from wide.errors import ConnectionLost
from wide.transport.hub import CALLERS, RUNG, Ready
from wide.transport.tcp import ip


class MemoryStream:
    """One end. `most_nbytes` limits what a call moves (torn frames); `cut_after_nbytes` breaks the line mid-way. What
    is sent is handed to `carry`, which brings it to the other end, now or later, or loses it.
    """

    binding = b""

    def __init__(self, most_nbytes: int = 1 << 30, cut_after_nbytes: int | None = None) -> None:
        self.is_closed = False
        self.is_over = False  # the other end has closed, and nothing more will come
        self.carry: Callable[[bytes], None] = lambda data: None
        self.on_close: Callable[[], None] = lambda: None
        self.on_input: Callable[[], None] = lambda: None
        self.most_nbytes = most_nbytes
        self._left = cut_after_nbytes
        self._incoming = bytearray()

    def arrive(self, data: bytes) -> None:
        """Something from the other end."""
        self._incoming += data
        self.on_input()

    def hang_up(self) -> None:
        """The other end has closed."""
        self.is_over = True
        self.on_input()

    def has_input(self) -> bool:
        return bool(self._incoming) or self.is_over

    def set_blocking(self, is_blocking: bool) -> None:
        """It never blocks."""

    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None:
        """There is nobody else who could do anything meanwhile."""
        if reading and not self.has_input():
            raise ConnectionLost("nothing will come any more")

    def receive_into(self, view: memoryview) -> int:
        nbytes = min(len(view), len(self._incoming), self.most_nbytes)
        if nbytes == 0 and (self.is_over or self.is_closed):
            raise ConnectionLost("the peer closed the connection")
        view[:nbytes] = self._incoming[:nbytes]
        del self._incoming[:nbytes]
        return nbytes

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self.is_closed or self.is_over:
            raise ConnectionLost("the connection broke: closed")
        data = b"".join(buffers)[: self.most_nbytes]
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
        self.carry(data)
        if self._left == 0:
            self.close()
        return len(data)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.on_close()


def pair(most_nbytes: int = 1 << 30, cut_after_nbytes: int | None = None) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends; the faults are those of the first."""
    left, right = MemoryStream(most_nbytes, cut_after_nbytes), MemoryStream(most_nbytes)
    for one, other in ((left, right), (right, left)):
        one.carry, one.on_close = other.arrive, other.hang_up
    return left, right


class MemoryCall:
    """Somebody who wants to be accepted, and is ready to speak."""

    def __init__(self, stream: MemoryStream, address: str) -> None:
        self.stream, self.address, self.host = stream, address, address.rpartition(":")[0]
        self.is_own = not self.host or ip(self.host).is_loopback

    def answer(self) -> MemoryStream:
        return self.stream

    def close(self) -> None:
        self.stream.close()


class MemoryHub:
    """A coordinator's end of many lines. `pass_time(seconds, has_news)` returns when there is news, or after that."""

    def __init__(self, pass_time: Callable[[float, Callable[[], bool]], float]) -> None:
        self.idle_s = 0.0
        self._pass_time = pass_time
        self._keys: dict[MemoryStream, object] = {}
        self._loud: dict[MemoryStream, None] = {}  # those that have input, in their order; and
        self._writing: dict[MemoryStream, None] = {}  # those that want to write
        self._callers: deque[MemoryCall] = deque()
        self._is_ringing = False
        self._is_listening = self._is_told = True

    def call(self, stream: MemoryStream, address: str) -> None:
        """Somebody wants to be accepted."""
        if self._is_listening:
            self._callers.append(MemoryCall(stream, address))
        else:
            stream.close()

    def wait(self, timeout_s: float) -> list[Ready]:
        self._loud = {stream: None for stream in self._loud if stream.has_input()}
        if not self._has_news():
            self.idle_s += self._pass_time(timeout_s, self._has_news)
        concerned = {**self._loud, **self._writing}
        ready = [Ready(self._keys[s], s.has_input(), s in self._writing) for s in concerned if s in self._keys]
        if self._callers and self._is_told:
            ready.append(Ready(CALLERS, True, False))
        if self._is_ringing:
            self._is_ringing = False
            ready.append(Ready(RUNG, True, False))
        return ready

    def _has_news(self) -> bool:
        return bool((self._callers and self._is_told) or self._is_ringing or self._writing or self._loud)

    def accept(self) -> MemoryCall | None:
        return self._callers.popleft() if self._callers else None

    def register(self, stream: MemoryStream, key: object) -> None:
        self._keys[stream] = key
        stream.on_input = lambda: self._loud.setdefault(stream)
        if stream.has_input():
            self._loud[stream] = None

    def watch_writing(self, stream: MemoryStream, key: object, is_wanted: bool) -> None:
        if is_wanted:
            self._writing[stream] = None
        else:
            self._writing.pop(stream, None)

    def unregister(self, stream: MemoryStream) -> None:
        del self._keys[stream]
        self._loud.pop(stream, None)
        self._writing.pop(stream, None)
        stream.on_input = lambda: None

    def ring(self) -> None:
        self._is_ringing = True

    def listen(self, is_wanted: bool) -> None:
        self._is_told = is_wanted

    def stop_listening(self) -> None:
        self._is_listening = False
        while self._callers:
            self._callers.popleft().close()

    def close(self) -> None:
        self._keys.clear()
