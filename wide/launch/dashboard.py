"""`--dashboard` and `wide dashboard`: who may look, where, and by which link. A run's own dashboard is a process that
reads run.db, and asks things of the coordinator only by way of it: it cannot slow, hang or end training otherwise.
"""

from __future__ import annotations

import contextlib
import importlib.util
import ipaddress
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from wide import __version__
from wide.config import DASHBOARD_PORT, Options, place_of
from wide.dashboard.doorkeeper import Doorkeeper, Role
from wide.errors import UsageError
from wide.launch.addresses import addresses
from wide.launch.invites import LINKS, make_invite, terms_of
from wide.launch.keys import CERTIFICATE, KEY, keys_in, root_of, write_secret
from wide.store.access import Access
from wide.store.lock import is_held
from wide.store.reading import DATABASE
from wide.store.rundb import create
from wide.store.wishes import What, ask
from wide.telemetry.log import log
from wide.transport.tcp import shown
from wide.wire.proof import derived

LOG = "dashboard.log"
NEEDED = ("starlette", "uvicorn")
END_S = 4.0  # for last words
WARM_S = 1.0  # a page that is opened at once comes first
SECRETS_S = 1.0  # a secret that was revoked is good for so long


class Place(NamedTuple):
    """Where a dashboard listens, and whether runs can be steered from it. `fd` is the listening socket, where one can
    be handed over.
    """

    host: str
    port: int
    control: bool = False
    fd: int = -1

    @property
    def is_here(self) -> bool:
        return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback


def find_place(text: str, control: bool) -> tuple[Place, socket.socket]:
    """And the socket that listens there, so that nobody else does. Raises UsageError, before anything is begun."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--dashboard needs {' and '.join(missing)}: pip install 'wiiiiide[dashboard]'")
    host, port = place_of(text)
    listener = _listener(host, port)
    fd = listener.fileno() if os.name == "posix" else -1
    return Place(host, listener.getsockname()[1], control, fd), listener


def _listener(host: str, port: int | None) -> socket.socket:
    """On that port; on any, if none is named, and then preferably on the usual one."""
    problem = ""
    for wish in [port] if port is not None else [DASHBOARD_PORT, 0]:
        try:
            return socket.create_server((host, wish), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            problem = error.strerror or str(error)
    raise UsageError(f"the dashboard cannot listen on {shown(host, port or 0)} ({problem}): choose another place")


# ── beside a run ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def shown_on_page(found: tuple[Place, socket.socket] | None, folder: Path, tells: bool) -> Iterator[None]:
    """A page about the run in this folder, while the block runs."""
    if found is None:
        yield
        return
    place, listener = found
    create(folder / DATABASE)  # there is something to look at from the first moment on
    links = links_to(place, folder)
    write_secret(folder / LINKS, "\n".join(links) + "\n")
    if tells:
        print("\n".join(f"dashboard: {link}" for link in links), file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "wide.launch.dashboard", msgspec.json.encode(place).decode(), str(folder)]
    with (
        open(folder / LOG, "ab") as words,
        _started(command, words, listener, place.fd) as process,
    ):
        try:
            yield
        finally:
            _end(process, folder)


def _started(command: list[str], words: Any, listener: socket.socket, fd: int) -> subprocess.Popen[bytes]:
    """The socket is its own from then on. Where it cannot be handed over (Windows), it is opened there again."""
    given: dict[str, Any] = {"pass_fds": (fd,)} if fd >= 0 else {}
    with listener:
        if fd < 0:
            listener.close()
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=words, stderr=words, start_new_session=True, **given
        )


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    if process.poll() is not None:
        log.warning("the dashboard had ended before the run did: %s says why", folder / LOG)
    process.terminate()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
    (folder / LINKS).unlink(missing_ok=True)


def main(place: Place, folder: Path) -> None:
    """The process: until it is told to end, or the run's coordinator is gone without a word."""
    listener = socket.socket(fileno=place.fd) if place.fd >= 0 else _listener(place.host, place.port)
    _serve([folder], place, listener, lambda: not is_held(folder))


# ── wide dashboard ───────────────────────────────────────────────────────────────────────────────────────────────────


def dashboard(folders: Sequence[Path], text: str, control: bool) -> None:
    """In this process, until Ctrl-C."""
    from wide.dashboard.account import account

    for folder in folders:
        account(folder)  # is it a run, and can it be read?
    place, listener = find_place(text, control)
    for link in links_to(place, folders[0]):
        print(f"dashboard: {link}", file=sys.stderr, flush=True)
    _serve(folders, place, listener)


def _serve(
    folders: Sequence[Path], place: Place, listener: socket.socket, is_over: Callable[[], bool] = lambda: False
) -> None:
    from wide.dashboard.following import Followed  # here, so that a coordinator does not load what it does not need
    from wide.dashboard.serving import serve
    from wide.dashboard.web import Dashboard

    runs = [Followed(folder, name) for folder, name in zip(folders, _names(folders), strict=True)]
    warming = threading.Timer(WARM_S, runs[0].warm)
    warming.daemon = True
    warming.start()
    doorkeeper = Doorkeeper(place.is_here, place.control, Secrets(place, folders[0]))
    page = Dashboard(runs, doorkeeper, Steers(), __version__)
    certificate = None if place.is_here else (folders[0] / CERTIFICATE, folders[0] / KEY)
    serve(page.app(), page.stream, listener, certificate, is_over)


def _names(folders: Sequence[Path]) -> list[str]:
    """What their folders are called; a second one of that name has a number."""
    names: list[str] = []
    for folder in folders:
        name = folder.resolve().name
        wishes = (name, *(f"{name}-{i}" for i in range(2, len(folders) + 1)))
        names.append(next(wish for wish in wishes if wish not in names))
    return names


# ── who may look ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Secrets:
    """Those that are good now. They follow from the pool's root, and from how often they were revoked; then the file
    with a run's links has new ones.
    """

    def __init__(self, place: Place, folder: Path) -> None:
        self._place, self._folder = place, folder
        self._until, self._found = 0.0, dict[Role, str]()
        self._roles: list[Role] = [] if place.is_here else ["viewer"]
        self._roles += ["admin"] if place.control else []

    def __call__(self) -> Mapping[Role, str]:
        if time.monotonic() >= self._until:
            with contextlib.suppress(UsageError):  # being written, or gone: what was known still holds
                before, self._found = self._found, {role: secret_of(self._folder, role) for role in self._roles}
                if before not in ({}, self._found) and (self._folder / LINKS).exists():
                    write_secret(self._folder / LINKS, "\n".join(links_to(self._place, self._folder)) + "\n")
            self._until = time.monotonic() + SECRETS_S
        return self._found


def secret_of(folder: Path, role: Role) -> str:
    return derived(root_of(folder), role, str(Access(folder / DATABASE).generation(role))).hex()


def links_to(place: Place, folder: Path) -> list[str]:
    """What to open: to look; and, if runs can be steered, the one for whoever may."""
    if place.is_here and not place.control:
        return [f"http://{shown(place.host, place.port)}/"]
    keys = keys_in(folder)
    scheme = "http" if place.is_here else "https"
    host = place.host if place.is_here else addresses(place.host)[0]
    link = f"{scheme}://{shown(host, place.port)}/"
    links = [link] if place.is_here else [f"{link}#key={secret_of(folder, 'viewer')} (certificate {keys.shown})"]
    if place.control:
        links.append(f"{link}#key={secret_of(folder, 'admin')} (may steer: a secret)")
    return links


class Steers:
    """What can be done to a run from its page."""

    def do(self, folder: Path, what: str, node: int | None) -> dict[str, Any]:
        if what == "invite":
            return _invitation(folder)
        if what not in get_args(What):
            raise UsageError("nobody here knows how to do that")
        return {"said": ask(folder, what, node)}  # type: ignore[arg-type]


def _invitation(folder: Path) -> dict[str, Any]:
    invite = make_invite(folder, name="dashboard")
    text = invite.encode()
    told: dict[str, Any] = {"said": terms_of(), "command": f"wide join {text}"}
    if importlib.util.find_spec("segno") is not None:
        import segno

        told["qr"] = segno.make(text, error="l", micro=False).svg_data_uri(border=3, scale=4, light="white")
    return told


def check(options: Options) -> tuple[Place, socket.socket] | None:
    """Where the page of a run with these options will be, if one is wanted."""
    if options.dashboard is None:
        if options.control:
            raise UsageError("--control is for a dashboard: say --dashboard, too")
        return None
    return find_place(options.dashboard, options.control)


if __name__ == "__main__":
    main(msgspec.json.decode(sys.argv[1], type=Place), Path(sys.argv[2]))
