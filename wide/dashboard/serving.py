"""The dashboard over HTTP: one uvicorn server that stays small, whoever calls. Knows uvicorn.

At most so many connections are open: whoever comes as one more takes the place of the oldest. A page comes back at
once, and is then the newest; whoever never reads, or never asks, does not come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from wide.dashboard.stream import Stream

MOST_CONNECTIONS = 256
SEND_NBYTES = 64 << 10  # that the kernel keeps for a reader who does not read
LOOK_S = 1.0
NICE = 10  # training comes first

_open: OrderedDict[int, asyncio.Transport] = OrderedDict()  # of this process, the oldest first


class Limited(H11Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        while len(_open) >= MOST_CONNECTIONS:
            _open.popitem(last=False)[1].abort()
        _open[id(self)] = transport
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        _open.pop(id(self), None)
        super().connection_lost(exc)


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
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._stream.finish()
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
    given: dict[str, Any] = {}
    if certificate is not None:
        given = {"ssl_certfile": certificate[0], "ssl_keyfile": certificate[1]}
    config = uvicorn.Config(
        app,
        http=Limited,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=1,
        **given,
    )
    config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_NBYTES)
    Server(config, stream, is_over).run([listener])
