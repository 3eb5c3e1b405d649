"""`wide serve`: the coordinator, for nodes that are started elsewhere; and, if wanted, some nodes here."""

from __future__ import annotations

import base64
import contextlib
import ipaddress
import socket
import sys

import psutil

from wide.config import Options
from wide.job.loading import load, split_spec
from wide.launch.crew import Crew, LocalNodes, PoolDoor
from wide.launch.folder import DATABASE
from wide.launch.invites import FIRST, addresses_of, first_invite, guests_of
from wide.launch.keys import PoolKeys, keys_in
from wide.launch.processes import warm_up
from wide.launch.result import Result
from wide.launch.signals import say_and_end
from wide.launch.token import forget_token, read_token, token_file_in
from wide.launch.training import Origin, Training
from wide.store.access import Access
from wide.store.rundb import create
from wide.transport.tcp import Listener, shown
from wide.wire.invite import Invite

MOST_ADDRESSES = 4


def serve(spec: str, options: Options, token_file: str | None, address: str | None = None) -> Result:
    """Wait for nodes, train with whoever is there, end when the job is done."""
    token, count = read_token(token_file), options.nodes or 0
    forget_token()
    places = addresses_of(address, options.port) if address else ()
    if options.log != "silent" and sys.stderr.isatty():
        print(f"wide: serving {spec}; loading torch and the job …", file=sys.stderr, flush=True)
    job = load(spec)
    if job.evaluate is not None or count:
        warm_up(spec)
    training = Training(job, split_spec(spec)[0].stem, options, Origin(sys.argv, spec, end=say_and_end))
    folder = training.dir
    create(folder / DATABASE)
    keys = keys_in(folder)
    token = token or token_file_in(folder)[0]
    launcher = LocalNodes(spec, options, count, is_open=True)
    with contextlib.closing(Access(folder / DATABASE)) as access:
        door = PoolDoor(keys.tls, token, lambda token, evaluator: guests_of(folder, keys, token, evaluator, access))
        with contextlib.closing(Crew(spec, options, launcher, job.evaluate is not None, door)) as crew:
            assert crew.listener is not None  # the pool is open
            found = places or tuple((host, crew.listener.port) for host in addresses(crew.listener.host))
            _tell(first_invite(folder, found), keys, crew.listener, str(folder))
            return training.train(crew)


def _tell(invite: Invite, keys: PoolKeys, listener: Listener, folder: str) -> None:
    where = ", ".join(shown(*address) for address in invite.addresses)
    words = f"""\
pool {pool_name(keys.pin)} at {where}, TLS 1.3, certificate {keys.shown}
On each machine that should help (this line is a secret; 24 hours, 100 machines):

    wide join {invite.encode()}

Also in {folder}/{FIRST} (only you can read it). More, or fewer: wide invite {folder}
"""
    if ipaddress.ip_address(listener.host).is_loopback:
        words += "Only this machine, or the end of a tunnel, can reach it; --host 0.0.0.0 lets others in.\n"
    print(words, file=sys.stderr, end="", flush=True)


def pool_name(pin: bytes) -> str:
    """Four letters, for people who have several pools."""
    return base64.b32encode(pin).decode()[:4].lower()


def addresses(host: str) -> list[str]:
    """Where others find this machine, if it listens on `host`: for 0.0.0.0 and ::, which mean all, each of its own."""
    if not ipaddress.ip_address(host).is_unspecified:
        return [host]
    families = (socket.AF_INET, socket.AF_INET6) if ":" in host else (socket.AF_INET,)
    found = []
    for name, interface in psutil.net_if_addrs().items():
        if (state := psutil.net_if_stats().get(name)) is None or not state.isup:
            continue
        for entry in [entry for entry in interface if entry.family in families]:
            address = ipaddress.ip_address(entry.address.partition("%")[0])
            if not address.is_loopback and not address.is_link_local:
                found.append(address)
    found.sort(key=lambda address: address.version)  # what most machines can reach comes first
    return [str(address) for address in found[:MOST_ADDRESSES]] or ["::1" if ":" in host else "127.0.0.1"]
