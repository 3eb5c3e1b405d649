"""What is new in some runs, told once a second to whoever listens: found once, and sent to all of them.

A reader that does not read is not waited for: it misses what it does not take, and is let go of after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

EVERY_S = 1.0
STUCK_S = 30.0  # in which a reader has taken nothing
HEADERS = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store"), (b"x-accel-buffering", b"no")]

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class Stream:
    """`look` finds what is new; it is called in a thread, and only while somebody listens."""

    def __init__(self, look: Callable[[], list[dict[str, Any]]]) -> None:
        self._look = look
        self._number, self._data = 0, b""
        self._news = asyncio.Event()  # of the next message: each has its own
        self._listeners = 0
        self._is_over = False
        self._task: asyncio.Task[None] | None = None

    async def tell(self, receive: Receive, send: Send, may_still: Callable[[], bool]) -> None:
        """Until the reader is gone, stuck, or may not listen any more."""
        self._listeners += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())
        gone = asyncio.create_task(_disconnected(receive))
        telling = asyncio.create_task(self._send_all(send, may_still))
        try:
            await asyncio.wait((gone, telling), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._listeners -= 1
            for task in (gone, telling):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, TimeoutError, OSError):
                    await task

    async def _send_all(self, send: Send, may_still: Callable[[], bool]) -> None:
        await _patiently(send, {"type": "http.response.start", "status": 200, "headers": HEADERS})
        await _body(send, b": hello\n\n")
        number = self._number
        if self._data:
            await _body(send, self._data)
        while may_still() and not (self._is_over and number == self._number):
            if number == self._number:
                await self._news.wait()
            number = self._number
            await _body(send, self._data)
        await _patiently(send, {"type": "http.response.body", "body": b"", "more_body": False})

    async def finish(self) -> None:
        """Everybody is told how things stand, and then nothing more."""
        if self._task is not None:
            self._task.cancel()
        if self._listeners:
            await self._tell(await asyncio.to_thread(self._look), is_last=True)

    async def _work(self) -> None:
        while self._listeners:
            began = time.monotonic()
            await self._tell(await asyncio.to_thread(self._look))
            await asyncio.sleep(max(0.1, EVERY_S - (time.monotonic() - began)))
        self._data = b""  # whoever comes next is not told what was

    async def _tell(self, found: list[dict[str, Any]], is_last: bool = False) -> None:
        told = {"number": self._number + 1, "at": time.time(), "is_last": is_last, "runs": found}
        self._number += 1
        self._is_over = is_last
        self._data = b"data: " + msgspec.json.encode(told) + b"\n\n"
        heard, self._news = self._news, asyncio.Event()
        heard.set()


async def _body(send: Send, data: bytes) -> None:
    await _patiently(send, {"type": "http.response.body", "body": data, "more_body": True})


async def _patiently(send: Send, message: Message) -> None:
    async with asyncio.timeout(STUCK_S):
        await send(message)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
