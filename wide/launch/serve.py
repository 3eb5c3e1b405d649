"""`wide serve`: the coordinator, for nodes that are started elsewhere; and, if wanted, some nodes here."""

from __future__ import annotations

import base64
import contextlib
import functools
import ipaddress
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import msgspec

from wide.config import Options
from wide.errors import UsageError
from wide.job.loading import load, values_of
from wide.job.place import located
from wide.job.spec import split_spec, title_of
from wide.launch.addresses import addresses
from wide.launch.crew import Crew, Launcher, LocalNodes, PoolDoor
from wide.launch.engines import EXPIRES_S, USES
from wide.launch.folder import found_run, remembered_spec
from wide.launch.invites import (
    FIRST,
    LISTENING,
    Listening,
    addresses_of,
    first_invite,
    guests_of,
    listening_in,
    make_invite,
)
from wide.launch.keys import PoolKeys, keys_in, write_secret
from wide.launch.premade import adopt
from wide.launch.processes import warm_up
from wide.launch.result import Result
from wide.launch.signals import BEFORE, on_signals, say_and_end
from wide.launch.token import forget_token, read_token, token_file_in
from wide.launch.training import Origin, Training
from wide.store.reading import DATABASE
from wide.store.rundb import create
from wide.transport.listener import Listener
from wide.transport.tcp import shown


@dataclass(frozen=True)
class Serving:
    """What `wide serve` was told besides its options. None: nothing, so a run that goes on is served as before."""

    token_file: str | None = None
    host: str | None = None
    port: int | None = None
    address: str | None = None
    keys: str | None = None  # a folder with keys and an invite that were made before
    hides_invite: bool = False
    may_start_again: bool = False  # as a new process: this one is the command's own


Place = Callable[[str, Path], Launcher]  # given an invite and the run's folder


def serve(spec: str, options: Options, serving: Serving, place: Place | None = None) -> Result:
    """Wait for nodes, train with whoever is there, end when the job is done. `place`: nodes are placed by an engine;
    else whoever joins is a node, and `options.nodes` are started here.
    """
    token, count = read_token(serving.token_file), options.nodes or 0
    forget_token()
    if serving.address:
        addresses_of(serving.address, options.port or 1)  # any free one: which, will be seen
    spec = located(spec)
    if options.log != "silent" and sys.stderr.isatty():
        print(f"wide: serving {split_spec(spec)[0]}; loading torch and the job …", file=sys.stderr, flush=True)
    options, before = _as_before(spec, options, serving)
    spec = remembered_spec(spec, options)
    listener = Listener(options.host, options.port, options.socket, None, options.insecure)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))  # stdout is for the result alone
        stack.callback(listener.close)  # before there is a folder: a port that is taken leaves nothing behind
        job = load(spec)
        if job.evaluate is not None or (count and place is None):
            warm_up(spec)
        placed: list[Launcher] = []

        def end(number: int, why: str) -> NoReturn:
            """Before training began; but an engine may have been asked for nodes already."""
            while placed:
                placed.pop().close()
            say_and_end(number, why)

        may_start_again = serving.may_start_again and place is None
        origin = Origin(sys.argv, spec, end=end, values=values_of(spec), may_start_again=may_start_again)
        training = Training(job, title_of(split_spec(spec)[0]), options, origin)
        folder = training.dir
        create(folder / DATABASE)
        if serving.keys is not None:
            adopt(folder, Path(serving.keys))
        keys = keys_in(folder)
        listener.encrypt(keys.tls)
        token = token or token_file_in(folder)[0]
        _remember(folder, listener, serving.address, before)
        if place is None:
            launcher: Launcher = LocalNodes(spec, options, count, is_open=True, have_own_loops=job.own_loop is not None)
            _tell(folder, keys, listener, serving.hides_invite or serving.keys is not None)
        else:
            on_signals(lambda number, frame: end(number, BEFORE))
            launcher = place(make_invite(folder, EXPIRES_S, USES, "engine").encode(), folder)
            placed.append(launcher)
        door = PoolDoor(listener, token, functools.partial(guests_of, folder, keys))
        crew = stack.enter_context(contextlib.closing(Crew(spec, options, launcher, job.evaluate is not None, door)))
        return training.train(lambda: crew)


def _as_before(spec: str, options: Options, serving: Serving) -> tuple[Options, Listening | None]:
    """A pool that goes on is found where it was, so that nobody has to join again."""
    folder = found_run(spec, options)
    if folder is None:
        return options, None
    try:
        before = listening_in(folder)
    except UsageError:
        return options, None
    host = serving.host if serving.host is not None else before.host
    port = serving.port if serving.port is not None else before.port
    return msgspec.structs.replace(options, host=host, port=port), before


def _remember(folder: Path, listener: Listener, address: str | None, before: Listening | None) -> None:
    if address:
        places = addresses_of(address, listener.port)
    elif before is not None and before.are_named:
        places = before.addresses
    else:
        places = tuple((host, listener.port) for host in addresses(listener.host))
    are_named = bool(address) or (before is not None and before.are_named)
    listening = Listening(listener.host, listener.port, places, are_named)
    write_secret(folder / LISTENING, msgspec.json.encode(listening).decode())


def _tell(folder: Path, keys: PoolKeys, listener: Listener, hides_invite: bool) -> None:
    invite, terms = first_invite(folder)
    where = ", ".join(shown(*address) for address in invite.addresses)
    pool = f"pool {pool_name(keys.pin)} at {where}, TLS 1.3, certificate {keys.shown}"
    if hides_invite:  # what is printed here may be a log that others read
        print(f"{pool}; its invite ({terms}) is in {folder}/{FIRST}", file=sys.stderr, flush=True)
        return
    words = f"""\
{pool}
On each machine that should help (this line is a secret; {terms}):

    wide join {invite.encode()}

Also in {folder}/{FIRST} (only you can read it). More, or fewer: wide invite {folder}
"""
    if ipaddress.ip_address(listener.host).is_loopback:
        words += "Only this machine, or the end of a tunnel, can reach it; --host 0.0.0.0 lets others in.\n"
    print(words, file=sys.stderr, end="", flush=True)


def pool_name(pin: bytes) -> str:
    """Four letters, for people who have several pools."""
    return base64.b32encode(pin).decode()[:4].lower()
