"""Two processes on loopback: a payload one way, a few bytes back. Over our Connection, or over a bare socket.

Knows how to time a round trip; knows nothing of what is compared.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any, Literal, Protocol

import torch

from wide.config import Sockets
from wide.transport.connection import Connection
from wide.transport.listener import Listener
from wide.transport.tcp import TcpStream, connect
from wide.wire import messages as say

ANSWER = b"done"
MESSAGE = say.Leaving("x")

Kind = Literal["ours", "bare"]


class Link(Protocol):
    """One end of one connection. One side gives and is thanked, the other takes and thanks."""

    def give(self, payload: memoryview) -> None: ...
    def take(self, nbytes: int) -> None: ...
    def thank(self) -> None: ...
    def be_thanked(self) -> None: ...


class Ours:
    """A frame with a payload, received straight into the tensor that `place` is a view of."""

    def __init__(self, stream: TcpStream, place: memoryview) -> None:
        self._connection = Connection(stream)
        self._connection.reader.allow(lambda message, nbytes: (place[:nbytes],) if nbytes else (), 1024, len(place))

    def give(self, payload: memoryview) -> None:
        self._connection.send(MESSAGE, payload)

    def take(self, nbytes: int) -> None:
        self._connection.wait()

    def thank(self) -> None:
        self._connection.send(MESSAGE)

    def be_thanked(self) -> None:
        self._connection.wait()


class Bare:
    """The least a program can do: both ends know how much will come. Options are those of the stream it is made of."""

    def __init__(self, stream: TcpStream, place: memoryview) -> None:
        self._sock, self._place = socket.socket(fileno=os.dup(stream.fileno())), place
        stream.close()

    def give(self, payload: memoryview) -> None:
        self._sock.sendall(payload)

    def take(self, nbytes: int) -> None:
        done = 0
        while done < nbytes:
            done += self._sock.recv_into(self._place[done:nbytes])

    def thank(self) -> None:
        self._sock.sendall(ANSWER)

    def be_thanked(self) -> None:
        self.take(len(ANSWER))


LINKS: dict[Kind, type[Ours] | type[Bare]] = {"ours": Ours, "bare": Bare}


def _room(nbytes: int) -> memoryview:
    view: memoryview = torch.zeros(nbytes, dtype=torch.uint8).numpy().data
    return view


class Loopback:
    """The asking side. The answering one is a process of its own that ends with this one."""

    def __init__(self, most_nbytes: int) -> None:
        self._payload, self._place = _room(most_nbytes), _room(len(ANSWER))
        self._links: list[Link] = []
        self._cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, most_nbytes), daemon=True)
        self._process.start()
        theirs.close()

    def open(self, kind: Kind, sockets: Sockets) -> int:
        """Another connection; its number."""
        self._pipe.send((kind, sockets))
        self._links.append(LINKS[kind](connect("127.0.0.1", self._pipe.recv(), sockets), self._place))
        return len(self._links) - 1

    def seconds(self, link: int, nbytes: int, rounds: int) -> float:
        """The median round trip; the first one is not counted."""
        self._pipe.send((link, nbytes, rounds + 1))
        ours, payload, times = self._links[link], self._payload[:nbytes], [time.perf_counter()]
        for _ in range(rounds + 1):
            ours.give(payload)
            ours.be_thanked()
            times.append(time.perf_counter())
        return median(after - before for before, after in pairwise(times[1:]))

    def share_cores(self, cores: int) -> None:
        """Both processes on one core, or each on its own, where the platform can do that and has as many."""
        if hasattr(os, "sched_setaffinity"):
            pids = (os.getpid(), self._process.pid or 0)
            for i, pid in enumerate(pids):
                os.sched_setaffinity(pid, {self._cores[i % min(cores, len(self._cores))]})

    def close(self) -> None:
        self._pipe.close()
        self._process.join()


def _answer(pipe: Pipe, most_nbytes: int) -> None:
    place, links = _room(most_nbytes), list[Link]()
    while True:
        try:
            order: tuple[Any, ...] = pipe.recv()
        except EOFError:
            return
        if len(order) == 2:
            kind, sockets = order
            links.append(_accept(pipe, kind, sockets, place))
            continue
        number, nbytes, rounds = order
        link = links[number]
        for _ in range(rounds):
            link.take(nbytes)
            link.thank()


def _accept(pipe: Pipe, kind: Kind, sockets: Sockets, place: memoryview) -> Link:
    listener = Listener("127.0.0.1", 0, sockets)
    pipe.send(listener.port)
    while (caller := listener.accept()) is None:
        time.sleep(0.001)
    listener.close()
    os.set_blocking(caller.stream.fileno(), True)
    return LINKS[kind](caller.stream, place)
