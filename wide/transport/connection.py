"""Frames over a stream: the pump between bytes and messages. Knows streams and the wire; knows no tensors.

The same pump serves blocking streams (a node waits for its work) and non-blocking ones (the coordinator never waits).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from itertools import islice

from wide.errors import ConnectionLost
from wide.transport.stream import Stream
from wide.wire.frames import Reader, Sink, encode, no_payload
from wide.wire.messages import OLDEST, Message

MOST_BUFFERS = 1024  # in one call; streams may take fewer


class Connection:
    """Sends and receives messages; counts bytes. Any thread may send; one receives."""

    def __init__(self, stream: Stream, sink: Sink = no_payload) -> None:
        self.stream = stream
        self.reader = Reader(sink)
        self.address = ""  # of the other end, as people write it; if it was dialled
        self.protocol = OLDEST  # until both ends have agreed on a newer one
        self.nonces: tuple[bytes, bytes] | None = None  # this conversation's: who dialled, and who was called
        self.bytes_sent = 0
        self.bytes_received = 0
        self._outbox: deque[bytes | memoryview] = deque()
        self._sending = threading.RLock()
        self._inbox: deque[Message] = deque()

    def send(self, message: Message, *payload: bytes | memoryview) -> None:
        """Send now what the network takes; `flush` sends the rest. Buffers must not change until then."""
        payload_nbytes = 0
        for view in payload:
            payload_nbytes += len(view)
        head = encode(message, payload_nbytes, self.protocol)
        with self._sending:
            if not self._outbox:
                sent = self.stream.send((head, *payload))
                self.bytes_sent += sent
                if sent == len(head) + payload_nbytes:
                    return
                self._outbox.extend((head, *payload))
                self._took(sent)
            else:
                self._outbox.extend((head, *payload))
            self.flush()

    def flush(self) -> None:
        with self._sending:
            while self._outbox:
                sent = self.stream.send(tuple(islice(self._outbox, MOST_BUFFERS)))
                if sent == 0:
                    return
                self.bytes_sent += sent
                self._took(sent)

    def _took(self, nbytes: int) -> None:
        while self._outbox and nbytes >= len(self._outbox[0]):
            nbytes -= len(self._outbox.popleft())
        if nbytes:
            self._outbox[0] = memoryview(self._outbox[0])[nbytes:]

    @property
    def has_unsent(self) -> bool:
        return bool(self._outbox)

    def receive(self) -> list[Message]:
        """One read; the messages that it completed."""
        nbytes = self.stream.receive_into(self.reader.space())
        if nbytes == 0:
            return []
        self.bytes_received += nbytes
        return self.reader.fed(nbytes)

    def wait(self) -> Message:
        """The next message, however long that takes. On a stream that does not block, what is unsent goes out too."""
        while not self._inbox:
            before = self.bytes_received
            messages = self.receive()
            if len(messages) == 1:
                return messages[0]
            self._inbox.extend(messages)
            if self.bytes_received == before:
                self.stream.wait(reading=True, writing=self.has_unsent)
                self.flush()
        return self._inbox.popleft()

    def poll(self) -> list[Message]:
        """What has come, and out with what is unsent, without waiting; for streams that do not block."""
        try:
            self.flush()
            before = -1
            while before != self.bytes_received:
                before = self.bytes_received
                self._inbox.extend(self.receive())
        except ConnectionLost:
            if not self._inbox:  # the other end's last words come first
                raise
        messages = list(self._inbox)
        self._inbox.clear()
        return messages

    def drain(self) -> None:
        """Until all is sent."""
        while self.has_unsent:
            self.stream.wait(reading=False, writing=True)
            self.flush()

    def part(self, timeout_s: float) -> None:
        """The last word was said: until the other end hangs up. Whoever closes with something unread in its hands takes
        back what it said last.
        """
        deadline = time.monotonic() + timeout_s
        self.stream.set_blocking(False)
        with contextlib.suppress(ConnectionLost):
            while (left_s := deadline - time.monotonic()) > 0:
                self.flush()
                self.stream.wait(reading=True, writing=self.has_unsent, timeout_s=left_s)
                self.receive()

    def look(self) -> list[Message]:
        """What has come, without waiting, even on a stream that blocks; `wait` and `poll` will return it too."""
        if self.stream.has_input():
            self._inbox.extend(self.receive())
        return list(self._inbox)

    def close(self) -> None:
        """The sink often knows whoever knows this connection: let go of it, or both wait for the garbage collector."""
        self.reader.sink = no_payload
        self.stream.close()
