"""The in-memory twin of TCP, with scripted faults: two ends in one process, no system calls, no time."""

from __future__ import annotations

from collections.abc import Sequence

from wide.errors import ConnectionLost


class MemoryStream:
    """One end. `most_nbytes` limits what a call moves (torn frames); `cut_after_nbytes` breaks the line mid-way."""

    def __init__(self, most_nbytes: int = 1 << 30, cut_after_nbytes: int | None = None) -> None:
        self.peer: MemoryStream = self
        self.is_closed = False
        self._most = most_nbytes
        self._left = cut_after_nbytes
        self._incoming = bytearray()

    def fileno(self) -> int:
        return -1

    def has_input(self) -> bool:
        return bool(self._incoming) or self.peer.is_closed

    def set_blocking(self, is_blocking: bool) -> None:
        """It never blocks."""

    def wait(self, reading: bool, writing: bool, timeout_s: float | None = None) -> None:
        """There is nobody else who could do anything meanwhile."""
        if reading and not self.has_input():
            raise ConnectionLost("nothing will come any more")

    def receive_into(self, view: memoryview) -> int:
        nbytes = min(len(view), len(self._incoming), self._most)
        if nbytes == 0 and (self.peer.is_closed or self.is_closed):
            raise ConnectionLost("the peer closed the connection")
        view[:nbytes] = self._incoming[:nbytes]
        del self._incoming[:nbytes]
        return nbytes

    def send(self, buffers: Sequence[bytes | memoryview]) -> int:
        if self.is_closed or self.peer.is_closed:
            raise ConnectionLost("the connection broke: closed")
        data = b"".join(buffers)[: self._most]
        if self._left is not None:
            data = data[: self._left]
            self._left -= len(data)
            if self._left == 0:
                self.close()
        self.peer._incoming += data
        return len(data)

    def close(self) -> None:
        self.is_closed = True


def pair(most_nbytes: int = 1 << 30, cut_after_nbytes: int | None = None) -> tuple[MemoryStream, MemoryStream]:
    """Two connected ends; the faults are those of the first."""
    left, right = MemoryStream(most_nbytes, cut_after_nbytes), MemoryStream(most_nbytes)
    left.peer, right.peer = right, left
    return left, right
