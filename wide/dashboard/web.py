"""The dashboard's own server: a page, its data as JSON, a stream of what is new, and, with the admin's secret, a few
things that can be done to a run. Knows starlette; what can be done, and how, is given to it.
"""

from __future__ import annotations

import gzip
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import msgspec
from anyio import CapacityLimiter, fail_after, to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from wide.dashboard.bars import Span
from wide.dashboard.doorkeeper import HEADERS, Doorkeeper, No
from wide.dashboard.following import UNREADABLE, Followed
from wide.dashboard.stream import Stream
from wide.errors import WideError

PAGE = Path(str(resources.files("wide.dashboard"))) / "page"
MOST_BODY_NBYTES = 4096
MOST_POINTS, MOST_COLUMNS, MOST_ROWS = 2000, 6000, 100
READERS = 4  # threads that read run.db at a time
MOST_ASKED = 200  # questions that wait for their answer, or to be read to its end
TAKE_S = 20.0  # for so long an answer is offered to somebody who does not read it
PIECE_NBYTES = 64 << 10
LARGE_NBYTES = 2000  # is worth compressing
MOST_TOLD = 20  # mistakes of our own, in the log
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
JSON = "application/json"


class Control(Protocol):
    """What can be done to a run: its words are shown to whoever asked. Raises WideError, if it cannot be done."""

    def do(self, folder: Path, what: str, node: int | None) -> dict[str, Any]: ...


class Dashboard:
    """Of these runs, the first of which is shown first."""

    def __init__(self, runs: Sequence[Followed], doorkeeper: Doorkeeper, control: Control, version: str) -> None:
        self._runs = {run.name: run for run in runs}
        self._doorkeeper, self._control, self._version = doorkeeper, control, version
        self.stream = Stream(lambda: [run.news() for run in runs])
        self._limit, self._asked = CapacityLimiter(READERS), 0

    def app(self) -> ASGIApp:
        one = "/api/runs/{run}"
        routes = [
            Route("/", self._page),
            Route("/metrics", self._answer(self._metrics, OPENMETRICS)),
            Route("/api", self._answer(self._about_server)),
            Route(one, self._answer(self._about)),
            Route(f"{one}/curves", self._answer(self._curves)),
            Route(f"{one}/series", self._answer(self._series)),
            Route(f"{one}/nodes/{{node}}", self._answer(self._node)),
            Route(f"{one}/events", self._answer(self._events)),
            Route(f"{one}/timeline", self._answer(self._timeline)),
            Route(f"{one}/control/{{what}}", self._steer, methods=["POST"]),
            Route("/api/stream", _Listening(self)),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: Mapping[Any, Any] = {No: _no}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guarded, self)])

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _page(self, request: Request) -> Response:
        """It holds no data, and so needs no secret."""
        return Response(
            (PAGE / "index.html").read_bytes(), media_type="text/html", headers={"cache-control": "no-cache"}
        )

    def _answer(self, find: Callable[[Request], bytes], kind: str = JSON) -> Callable[[Request], Awaitable[Response]]:
        """To whoever may look, and is still there when it is found: in a thread, a few at a time."""

        async def endpoint(request: Request) -> Response:
            self._doorkeeper.role(request.headers)
            if self._asked >= MOST_ASKED:
                raise No(503, "too much is asked at a time: try again")
            self._asked += 1
            answer: Answer | None = None
            try:
                async with self._limit:
                    if await request.is_disconnected():
                        return Response(status_code=499)
                    answer = await to_thread.run_sync(_found, find, request, kind)
                answer.afterwards = self._answered  # when it was read
            finally:
                if answer is None:
                    self._answered()
            return answer

        return endpoint

    def _answered(self) -> None:
        self._asked -= 1

    def _about_server(self, request: Request) -> bytes:
        role = self._doorkeeper.role(request.headers)
        may_steer = self._doorkeeper.may_steer and role == "admin"
        about = {"version": self._version, "runs": list(self._runs), "role": role, "may_steer": may_steer}
        return msgspec.json.encode(about)

    def _about(self, request: Request) -> bytes:
        return self._run(request).about()

    def _curves(self, request: Request) -> bytes:
        points = int(_number(request, "points", 1200, 10, MOST_POINTS))
        return self._run(request).curves(_number_or_none(request, "from"), _number_or_none(request, "to"), points)

    def _series(self, request: Request) -> bytes:
        return self._run(request).series(int(_number(request, "points", 300, 10, MOST_POINTS)))

    def _node(self, request: Request) -> bytes:
        points, node = int(_number(request, "points", 300, 10, MOST_POINTS)), request.path_params["node"]
        if not (node.isascii() and node.isdigit() and len(node) < 16):
            raise No(404, "there is no such node")
        return self._run(request).node(int(node), points)

    def _events(self, request: Request) -> bytes:
        return self._run(request).events()

    def _timeline(self, request: Request) -> bytes:
        columns = int(_number(request, "columns", 1200, 10, MOST_COLUMNS))
        first = int(_number(request, "row", 0, 0, 1e9))
        rows = int(_number(request, "rows", 40, 1, MOST_ROWS))
        span = Span(*(_number_or_none(request, name) for name in ("from", "to", "last")))
        return self._run(request).timeline(span, columns, first, rows)

    def _metrics(self, request: Request) -> bytes:
        name = request.query_params.get("run", next(iter(self._runs)))
        if name not in self._runs:
            raise No(404, "there is no such run here")
        return self._runs[name].metrics()

    def _run(self, request: Request) -> Followed:
        found = self._runs.get(request.path_params["run"])
        if found is None:
            raise No(404, "there is no such run here")
        return found

    async def listen(self, headers: Headers, receive: Receive, send: Send) -> None:
        self._doorkeeper.role(headers)
        await self.stream.tell(receive, send, lambda: self._may_look(headers))

    def _may_look(self, headers: Headers) -> bool:
        try:
            self._doorkeeper.role(headers)
        except No:
            return False
        return True

    def check_site(self, headers: Headers, path: str) -> None:
        self._doorkeeper.check_site(headers, is_page=path == "/")

    # ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _steer(self, request: Request) -> Response:
        self._doorkeeper.check_admin(request.headers)
        given = await _body(request)
        node = given.get("node")
        if node is not None and (not isinstance(node, int) or not 0 <= node < 1 << 53):
            raise No(400, "node: expected a number")
        folder, what = self._run(request).folder, request.path_params["what"]
        try:
            return _json(await to_thread.run_sync(self._control.do, folder, what, node))
        except WideError as error:
            raise No(409, str(error)) from None


class Answer(Response):
    """Sent in pieces, each for as long as its reader needs; but not for ever. What is sent is not copied: many readers
    of one answer share it.
    """

    afterwards: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with fail_after(TAKE_S):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            data = memoryview(self.body)
            for start in range(0, max(1, len(data)), PIECE_NBYTES):
                piece, is_last = data[start : start + PIECE_NBYTES], start + PIECE_NBYTES >= len(data)
                with fail_after(TAKE_S):
                    await send({"type": "http.response.body", "body": bytes(piece), "more_body": not is_last})
        except TimeoutError:
            return  # uvicorn ends the connection of an answer that is not whole
        finally:
            self.afterwards()


def _found(find: Callable[[Request], bytes], request: Request, kind: str) -> Answer:
    """In a thread."""
    try:
        data = find(request)
    except UNREADABLE as error:
        raise No(410, f"the run cannot be read: {error}") from None
    headers = {"cache-control": "no-store"}
    if len(data) > LARGE_NBYTES and "gzip" in request.headers.get("accept-encoding", ""):
        data, headers["content-encoding"] = gzip.compress(data, 1), "gzip"
    return Answer(data, 200, headers, media_type=kind)


class Guarded:
    """Every request, before anything else looks at it; every answer gets the headers that keep browsers careful."""

    def __init__(self, app: ASGIApp, dashboard: Dashboard) -> None:
        self._app, self._dashboard = app, dashboard
        self._told = 0  # mistakes of our own: a log that grows with every request fills the disk

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
            self._dashboard.check_site(Headers(scope=scope), scope["path"])
            await self._app(scope, receive, careful)
        except No as no:
            await _json({"error": no.why}, no.status)(scope, receive, careful)
        except Exception:
            self._tell()
            if not has_begun:
                await _json({"error": "this was not expected: the dashboard's log has it"}, 500)(
                    scope, receive, careful
                )

    def _tell(self) -> None:
        self._told += 1
        if self._told <= MOST_TOLD:
            traceback.print_exc(file=sys.stderr)


class _Listening:
    """The stream, as an application of its own: starlette would not notice a reader who does not read."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._dashboard.listen(Headers(scope=scope), receive, send)


async def _no(request: Request, error: No) -> Response:
    return _json({"error": error.why}, error.status)


async def _body(request: Request) -> dict[str, Any]:
    """A small JSON object, or nothing."""
    data = b""
    async for part in request.stream():
        data += part
        if len(data) > MOST_BODY_NBYTES:
            raise No(413, "that is too much")
    try:
        found = msgspec.json.decode(data or b"{}")
    except (msgspec.DecodeError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise No(400, "expected a JSON object")
    return found


def _json(data: Any, status: int = 200) -> Response:
    headers = {"cache-control": "no-store"}
    return Response(msgspec.json.encode(data), status, headers, media_type="application/json")


def _number(request: Request, name: str, usual: float, least: float, most: float) -> float:
    found = _number_or_none(request, name)
    return min(max(usual if found is None else found, least), most)


def _number_or_none(request: Request, name: str) -> float | None:
    text = request.query_params.get(name)
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not abs(value) < 1e15:
        raise No(400, f"{name}: expected a number")
    return value
