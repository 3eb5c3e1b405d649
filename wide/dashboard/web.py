"""The dashboard's own server: a page, its data as JSON, a stream of what is new, and, with the admin's secret, a few
things that can be done to a run. Knows starlette; what can be done, and how, is given to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import msgspec
from anyio import to_thread
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from wide.dashboard.answers import Answers, Endpoint, Guarded, as_json
from wide.dashboard.bars import Span
from wide.dashboard.doorkeeper import Doorkeeper, No
from wide.dashboard.following import Followed
from wide.dashboard.stream import Stream
from wide.errors import WideError

PAGE = Path(str(resources.files("wide.dashboard"))) / "page"
MOST_BODY_NBYTES = 4096
MOST_POINTS, MOST_COLUMNS, MOST_ROWS = 2000, 4800, 40
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"


class Control(Protocol):
    """What can be done to a run: its words are shown to whoever asked. Raises WideError, if it cannot be done."""

    def do(self, folder: Path, what: str, node: int | None) -> dict[str, Any]: ...


class Dashboard:
    """Of these runs, the first of which is shown first."""

    def __init__(self, runs: Sequence[Followed], doorkeeper: Doorkeeper, control: Control, version: str) -> None:
        self._runs = {run.name: run for run in runs}
        self._doorkeeper, self._control, self._version = doorkeeper, control, version
        self.stream = Stream(lambda: [run.news() for run in runs])
        self._answers = Answers(doorkeeper)

    def app(self) -> ASGIApp:
        one = "/api/runs/{run}"
        routes = [
            Route("/", self._page),
            Route("/metrics", self._answers.of(self._metrics, OPENMETRICS), methods=["GET"]),
            Route("/api", self._about_server),
            Route(one, self._answers.of(self._about), methods=["GET"]),
            Route(f"{one}/curves", self._answers.of(self._curves), methods=["GET"]),
            Route(f"{one}/series", self._answers.of(self._series), methods=["GET"]),
            Route(f"{one}/nodes/{{node}}", self._answers.of(self._node), methods=["GET"]),
            Route(f"{one}/events", self._answers.of(self._events), methods=["GET"]),
            Route(f"{one}/timeline", self._answers.of(self._timeline), methods=["GET"]),
            Route(f"{one}/control/{{what}}", self._steer, methods=["POST"]),
            Route("/api/stream", Endpoint(self._listen), methods=["GET"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        handlers: Mapping[Any, Any] = {No: _no}
        return Starlette(routes=routes, exception_handlers=handlers, middleware=[Middleware(Guarded, self._doorkeeper)])

    # ── what is seen ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _page(self, request: Request) -> Response:
        """It holds no data, and so needs no secret."""
        return Response(
            (PAGE / "index.html").read_bytes(), media_type="text/html", headers={"cache-control": "no-cache"}
        )

    async def _about_server(self, request: Request) -> Response:
        """Which nobody has to wait for."""
        role = self._doorkeeper.role(request.headers)
        may_steer = self._doorkeeper.may_steer and role == "admin"
        about = {"version": self._version, "runs": list(self._runs), "role": role, "may_steer": may_steer}
        return as_json(about)

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

    async def _listen(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An application of its own: starlette would not notice a reader who does not read."""
        headers = Headers(scope=scope)
        self._doorkeeper.role(headers)
        await self.stream.tell(receive, send, lambda: self._may_look(headers))

    def _may_look(self, headers: Headers) -> bool:
        try:
            self._doorkeeper.role(headers)
        except No:
            return False
        return True

    # ── what is done ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _steer(self, request: Request) -> Response:
        self._doorkeeper.check_admin(request.headers)
        given = await _body(request)
        node = given.get("node")
        if node is not None and (type(node) is not int or not 0 <= node < 1 << 53):
            raise No(400, "node: expected a number")
        folder, what = self._run(request).folder, request.path_params["what"]
        try:
            return as_json(await to_thread.run_sync(self._control.do, folder, what, node))
        except WideError as error:
            raise No(409, str(error)) from None


async def _no(request: Request, error: No) -> Response:
    return as_json({"error": error.why}, error.status)


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
