"""A dashboard's server without a socket, for tests that ask it things."""

from __future__ import annotations

import asyncio
import json

from wide.dashboard.doorkeeper import Doorkeeper
from wide.dashboard.following import Followed
from wide.dashboard.web import Dashboard
from wide.errors import NotYet, UsageError

EVIL = "<script>alert(1)</script>\x1b[31m"
ADMIN, VIEWER = "the admin's", "the viewer's"


class Steered:
    """What was asked of which run."""

    def __init__(self):
        self.asked = []

    def do(self, folder, what, node):
        if what == "fly":
            raise UsageError("nobody here knows how to do that")
        if what == "stop":
            raise NotYet("the run is not going on")
        self.asked.append((folder.name, what, node))
        return {"said": "done"}


def a_server(*folders, is_here=True, may_steer=True):
    secrets = {"admin": ADMIN} if is_here else {"viewer": VIEWER, "admin": ADMIN}
    doorkeeper, steered = Doorkeeper(is_here, may_steer, lambda: secrets), Steered()
    dashboard = Dashboard([Followed(folder, folder.name) for folder in folders], doorkeeper, steered, "1.0")
    return dashboard.app(), steered


def ask(app, path, method="GET", body=b"", **headers):
    """(status, headers, body) of one request, as uvicorn would bring it."""
    given = {"host": "127.0.0.1:9434"} | {name.replace("_", "-"): value for name, value in headers.items()}
    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 9434),
        "headers": [(name.encode(), value.encode()) for name, value in given.items()],
    }
    said, parts = [], [body]

    async def receive():
        if not parts:
            await asyncio.Event().wait()  # it stays on the line
        return {"type": "http.request", "body": parts.pop(), "more_body": False}

    async def send(message):
        said.append(message)

    asyncio.run(app(scope, receive, send))
    data = b"".join(message.get("body", b"") for message in said)
    return said[0]["status"], {name.decode(): value.decode() for name, value in said[0]["headers"]}, data


def found(app, path, **headers):
    status, _, data = ask(app, path, **headers)
    assert status == 200, data
    return json.loads(data)
