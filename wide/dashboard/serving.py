"""The dashboard over HTTP: one uvicorn server that stays small, whoever calls. Knows uvicorn.

At most so many connections are open: whoever comes as one more takes the place of the oldest. A page comes back at
once, and is then the newest; whoever never reads, or never asks, does not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from wide.dashboard.stream import Stream

MOST_CONNECTIONS = 128
SEND_NBYTES = 64 << 10  # that the kernel keeps for a reader who does not read
BACKLOG = 128  # so many are let in before those who have to go are seen off
COLLECTED = 64  # callers later, what they left is looked for: of TLS 0.3 MB each, in circles that keep themselves alive
LOOK_S = 1.0
NICE = 10  # training comes first


class Limited(socket.socket):
    """A listener that counts whom it let in, from the first moment on: before a word was said, or a handshake made."""

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.family, listener.type, listener.proto, fileno=listener.detach())
        self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
        self._inside: list[socket.socket] = []  # the oldest first
        self._count = 0

    def accept(self) -> tuple[socket.socket, Any]:
        caller, address = super().accept()
        self._inside = [other for other in self._inside if other.fileno() >= 0]
        for other in self._inside[: max(0, len(self._inside) - MOST_CONNECTIONS + 1)]:
            with contextlib.suppress(OSError):
                other.shutdown(socket.SHUT_RDWR)
        self._inside = [*self._inside[-MOST_CONNECTIONS + 1 :], caller]
        self._count += 1
        if self._count % COLLECTED == 0:
            gc.collect()
        return caller, address


class Server(uvicorn.Server):
    """Before it ends, everybody who listens is told how the run stands then."""

    def __init__(self, config: uvicorn.Config, stream: Stream, is_over: Callable[[], bool]) -> None:
        super().__init__(config)
        self._stream, self._is_over = stream, is_over
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        watching = asyncio.create_task(self._watch())
        try:
            await super().serve(sockets)
        finally:
            watching.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._ending is None:
            self._ending = asyncio.create_task(self._say_last_words())

    async def _say_last_words(self) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                await self._stream.finish()
        except TimeoutError:
            pass
        finally:
            self.should_exit = True

    async def _watch(self) -> None:
        """Is anybody left for whom this was started?"""
        while not await asyncio.to_thread(self._is_over):
            await asyncio.sleep(LOOK_S)
        self._end()


def serve(
    app: ASGIApp,
    stream: Stream,
    listener: socket.socket,
    certificate: tuple[Path, Path] | None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Until a signal comes, or `is_over`. `certificate`: its file, and its key's."""
    if hasattr(os, "nice"):
        os.nice(NICE)
    if hasattr(os, "SCHED_BATCH"):
        with contextlib.suppress(OSError):  # not allowed in some containers
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # it interrupts nobody
    given: dict[str, Any] = {}
    if certificate is not None:
        given = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    config = uvicorn.Config(
        app,
        http="h11",
        loop="asyncio",  # others would not ask our listener
        ws="none",
        lifespan="off",
        log_level="critical",  # what callers do wrong would fill the disk; our own mistakes are told by web.py
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        backlog=BACKLOG,
        **given,
    )
    config.load()
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # the same, for what uvicorn does not catch
    sys.setswitchinterval(0.001)  # threads that read a million leases do not keep the page waiting
    gc.freeze()  # what is there now stays
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    Server(config, stream, is_over).run([Limited(listener)])
