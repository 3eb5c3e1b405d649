"""How the dashboard answers: found in a thread, a few at a time, sent in pieces to whoever reads. Knows starlette.

Whatever is asked, by however many, memory stays small: of questions only so many wait, an answer that many are given is
there once, and is not offered for ever to somebody who does not take it.
"""

from __future__ import annotations

import gzip
import sys
import traceback
from collections.abc import Callable
from typing import Any

import h11
import msgspec
from anyio import CapacityLimiter, fail_after, to_thread
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wide.dashboard.doorkeeper import HEADERS, Doorkeeper, No
from wide.dashboard.following import UNREADABLE

READERS = 4  # threads that read run.db at a time
MOST_ASKED = 200  # questions that wait for their answer, or to be read to its end
TAKE_S = 20.0  # for so long a piece is offered
PIECE_NBYTES = 64 << 10
LARGE_NBYTES = 2000  # is worth compressing
MOST_TOLD = 20  # mistakes of our own, in the log: one that grows with every request fills the disk
JSON = "application/json"

Find = Callable[[Request], bytes]


class Answers:
    """To whoever may look."""

    def __init__(self, doorkeeper: Doorkeeper) -> None:
        self._doorkeeper = doorkeeper
        self._limit, self._asked = CapacityLimiter(READERS), 0

    def of(self, find: Find, kind: str = JSON) -> ASGIApp:
        """What `find` finds, as an application of its own."""
        return Endpoint(lambda *line: self._answer(find, kind, *line))

    async def _answer(self, find: Find, kind: str, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        self._doorkeeper.role(request.headers)
        if self._asked >= MOST_ASKED:
            raise No(503, "too much is asked at a time: try again")
        self._asked += 1
        try:
            async with self._limit:
                if await request.is_disconnected():
                    return
                answer = await to_thread.run_sync(_found, find, kind, request)
            await _sent(answer, send)
        except TimeoutError:
            pass  # uvicorn ends the connection of an answer that is not whole
        finally:
            self._asked -= 1


class Endpoint:
    """An application for one route: starlette takes functions for something else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


def _found(find: Find, kind: str, request: Request) -> Response:
    try:
        data = find(request)
    except UNREADABLE as error:
        raise No(410, f"the run cannot be read: {error}") from None
    headers = {"cache-control": "no-store"}
    if len(data) > LARGE_NBYTES and "gzip" in request.headers.get("accept-encoding", ""):
        data, headers["content-encoding"] = gzip.compress(data, 1), "gzip"
    return Response(data, 200, headers, media_type=kind)


async def _sent(answer: Response, send: Send) -> None:
    with fail_after(TAKE_S):
        await send({"type": "http.response.start", "status": answer.status_code, "headers": answer.raw_headers})
    data = memoryview(answer.body)
    for start in range(0, max(1, len(data)), PIECE_NBYTES):
        piece, is_last = data[start : start + PIECE_NBYTES], start + PIECE_NBYTES >= len(data)
        with fail_after(TAKE_S):
            await send({"type": "http.response.body", "body": bytes(piece), "more_body": not is_last})


class Guarded:
    """Every request, before anything else looks at it; every answer gets the headers that keep browsers careful."""

    def __init__(self, app: ASGIApp, doorkeeper: Doorkeeper) -> None:
        self._app, self._doorkeeper = app, doorkeeper
        self._told = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        has_begun = False

        async def careful(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                extra = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *extra]
            await send(message)

        try:
            self._doorkeeper.check_site(Headers(scope=scope), is_page=scope["path"] == "/")
            await self._app(scope, receive, careful)
        except No as no:
            await as_json({"error": no.why}, no.status)(scope, receive, careful)
        except h11.ProtocolError:
            return None  # a caller's mistake, which uvicorn answers
        except Exception:
            self._tell()
            if not has_begun:
                words = {"error": "this was not expected: the dashboard's log has it"}
                await as_json(words, 500)(scope, receive, careful)

    def _tell(self) -> None:
        self._told += 1
        if self._told <= MOST_TOLD:
            traceback.print_exc(file=sys.stderr)


def as_json(data: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(data), status, {"cache-control": "no-store"}, media_type=JSON)
