"""Light nodes: many in one process. They speak the real protocol over real sockets, and compute nothing.

python -m benchmarks.light PORT TOKEN JOB COUNT     joins COUNT of them, says "ready" once all are, works until stopped
"""

from __future__ import annotations

import selectors
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from wide.errors import ConnectionLost
from wide.job.loading import load
from wide.job.program import program_of
from wide.job.settings import build
from wide.node.workbench import Workbench
from wide.transport.connection import Connection
from wide.transport.introduction import Self, say_hello
from wide.transport.tcp import connect
from wide.wire import messages as say
from wide.wire.frames import Destinations
from wide.wire.proof import of_token

CPU = torch.device("cpu")


class Light:
    """One connection, which answers each lease with zeros. It says that it is alone on its machine."""

    def __init__(self, port: int, token: str, name: str, threads: int) -> None:
        self.stream = connect("127.0.0.1", port)
        self._connection, self._scratch = Connection(self.stream, self._place_for), memoryview(bytearray(1 << 16))
        self._connection.reader.allow(self._place_for, 1 << 20, 1 << 30)
        self._ahead: say.Work | None = None
        self._payload = memoryview(b"")
        self._touched = b""
        who = Self("node", name, f"machine of {name}", 1, build(CPU, threads), name)
        say_hello(self._connection, of_token(token), who)

    def welcome(self) -> say.Welcome:
        """Until it should build its model."""
        message = self._connection.wait()
        assert isinstance(message, say.Welcome), message
        while isinstance(probe := self._connection.wait(), say.Probe) and not probe.is_last:
            self._connection.send(probe, self._load)
        return message

    def begin(self, ready: say.Ready, nbytes: int, tensors: int) -> None:
        self._payload, self._touched = (
            memoryview(bytes(nbytes)),
            ((1 << tensors) - 1).to_bytes(tensors // 8 + 1, "little"),
        )
        self.stream.set_blocking(False)
        self._connection.send(ready)

    def react(self) -> None:
        for message in self._connection.receive():
            if isinstance(message, say.Work) and message.is_ahead:
                self._ahead = message
            elif isinstance(message, say.Work):
                self._answer(message)
            elif isinstance(message, say.Weights) and self._ahead is not None:
                self._answer(self._ahead)
            elif isinstance(message, say.Alive):
                self._connection.send(message)
            elif isinstance(message, say.Stop):
                raise ConnectionLost(message.why)

    def _answer(self, work: say.Work) -> None:
        losses = [1.0] * len(work.sizes)
        self._connection.send(say.Update(work.lease, losses, self._touched, 0.001, 0.0, 0.0, 0), self._payload)

    def _place_for(self, message: say.Message, nbytes: int) -> Destinations:
        self._load = self._scratch[:nbytes]
        return (self._load,) if nbytes else ()


def _patiently(call: Callable[[], Light]) -> Light:
    """A pool lets so many callers of one address in at a time; the others call again."""
    while True:
        try:
            return call()
        except ConnectionLost:
            time.sleep(0.05)


def main(port: int, token: str, file: str, count: int) -> None:
    torch.set_num_threads(1)
    job, selector = load(file), selectors.DefaultSelector()
    bench: Workbench | None = None
    for i in range(count):
        light = _patiently(lambda i=i: Light(port, token, f"{token}-{i}-{id(selector)}", job.threads))  # type: ignore[misc]
        welcome = light.welcome()
        if bench is None:
            bench = Workbench(job, welcome, CPU, program_of(Path(file)))
            ready, layout = bench.describe(), bench.trainer.layout
        light.begin(ready, layout.live_nbytes, len(layout.trainable))
        selector.register(light.stream, selectors.EVENT_READ, light)
    print("ready", flush=True)
    while selector.get_map():
        for key, _ in selector.select():
            try:
                key.data.react()
            except ConnectionLost:
                selector.unregister(key.fileobj)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
