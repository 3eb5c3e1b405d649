"""Callers who should not get in, as many as asked for, for a while.

python -m benchmarks.attackers KIND PORT SECONDS     connects: 3,000 a second · guesses: 10,000, of a token ·
    idle: 4,000 connections that say nothing · slow: 500 that say a byte a second · tls: handshakes that lead to nothing
"""

from __future__ import annotations

import contextlib
import resource
import socket
import sys
import time
from collections.abc import Callable

from wide.errors import WideError
from wide.transport.connection import Connection
from wide.transport.introduction import Self, say_hello
from wide.transport.tcp import connect
from wide.transport.tls import Handshake, client_context
from wide.wire.proof import of_token

CONNECTS_PER_S, GUESSES, IDLE, SLOW = 3000, 10_000, 4000, 500


def connects(port: int, seconds: float) -> int:
    began, done = time.monotonic(), 0
    while (spent := time.monotonic() - began) < seconds:
        if done >= spent * CONNECTS_PER_S:
            time.sleep(0.002)
            continue
        with socket.socket() as sock:
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))
        done += 1
    return done


def guesses(port: int, seconds: float) -> int:
    """Each over a connection of its own: whoever guesses wrong is sent away."""
    began, done, answered = time.monotonic(), 0, 0
    while done < GUESSES and time.monotonic() - began < seconds:
        done += 1
        time.sleep(0.001)
        try:
            connection = Connection(connect("127.0.0.1", port, timeout_s=1.0, silence_s=1.0))
            with contextlib.closing(connection):
                say_hello(connection, of_token(f"guess {done}"), Self("node", "guess", "elsewhere", 1))
        except WideError as error:
            answered += "wrong token" in str(error)
    return answered


def tls(port: int, seconds: float) -> int:
    began, done, context = time.monotonic(), 0, client_context()
    while time.monotonic() - began < seconds:
        time.sleep(0.005)
        with contextlib.suppress(WideError, OSError):
            stream = connect("127.0.0.1", port, timeout_s=1.0, silence_s=1.0)
            with contextlib.closing(stream):
                handshake = Handshake(stream, context, is_server=False)
                handshake.advance(reads=False)
                while handshake.advance() is None:
                    pass
                done += 1
    return done


def idle(port: int, seconds: float) -> int:
    return len(_held(IDLE, port, seconds, lambda sock: None))


def slow(port: int, seconds: float) -> int:
    """Half of them as if they began to encrypt, half of them as if they began to speak."""

    def creep(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.send(b"\x16\x03\x01"[:1] if sock.fileno() % 2 else b"WIDE"[:1])

    return len(_held(SLOW, port, seconds, creep))


def _held(count: int, port: int, seconds: float, each_second: Callable[[socket.socket], None]) -> list[socket.socket]:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    began, held = time.monotonic(), []
    for _ in range(count):
        sock = socket.socket()
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        held.append(sock)
    while time.monotonic() - began < seconds:
        for sock in held:
            each_second(sock)
        time.sleep(1.0)
    return held


KINDS: dict[str, Callable[[int, float], int]] = {
    "connects": connects,
    "guesses": guesses,
    "idle": idle,
    "slow": slow,
    "tls": tls,
}

if __name__ == "__main__":
    print(KINDS[sys.argv[1]](int(sys.argv[2]), float(sys.argv[3])))
