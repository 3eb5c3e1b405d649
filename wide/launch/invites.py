"""`wide invite`, `wide invites`, `wide revoke`: who may come into a pool, also while it runs. Knows a run's folder."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import re
import secrets
import ssl
import time
from pathlib import Path
from typing import Any

from wide.errors import UsageError
from wide.exchange.guests import Book, Guests, InviteRow, book_of
from wide.launch.folder import DATABASE
from wide.launch.keys import CERTIFICATE, PoolKeys, root_of, write_secret
from wide.store.access import Access
from wide.telemetry.log import log
from wide.transport.endpoint import host_and_port
from wide.transport.tls import fingerprint
from wide.wire.invite import MOST_ADDRESSES, PIN_NBYTES, Address, Invite, parse
from wide.wire.proof import derived

EXPIRES_S, USES = 24 * 3600.0, 100
FIRST, ADDRESSES = "invite", "addresses.json"  # the pool's first one, and where it is found, in the run's folder
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_S = 10 * 365 * 86400.0


def make_invite(
    folder: Path, expires_s: float = EXPIRES_S, uses: int = USES, name: str = "", addresses: tuple[Address, ...] = ()
) -> Invite:
    """Good from now on, whether the pool runs or will be resumed."""
    root, now = root_of(folder), time.time()
    places = addresses or _addresses(folder)
    id_ = secrets.token_hex(4)
    expires_min = math.ceil((now + expires_s) / 60)
    with contextlib.closing(Access(folder / DATABASE)) as access:
        access.add(id_, name, now, now + expires_s, uses)
    return Invite(id_, expires_min, places, _pin(folder), derived(root, "invite", id_))


def first_invite(folder: Path, addresses: tuple[Address, ...]) -> Invite:
    """What `wide serve` prints: the run's first one again, as long as it is good and leads here."""
    write_secret(folder / ADDRESSES, json.dumps(addresses))
    with contextlib.suppress(OSError, UsageError):
        before = parse((folder / FIRST).read_text())
        with contextlib.closing(Access(folder / DATABASE)) as access:
            rows = {row[0]: row for row in access.invites()}
        _, _, _, expires_at, uses, revoked_at, machines = rows.get(before.id, _NONE)
        is_good = revoked_at is None and expires_at > time.time() and machines < uses
        if is_good and before.addresses == addresses and before.pin == _pin(folder):
            return before
    invite = make_invite(folder, name="first", addresses=addresses)
    write_secret(folder / FIRST, invite.encode() + "\n")
    return invite


_NONE = ("", "", 0.0, 0.0, 0, None, 0)


def listed(folder: Path) -> str:
    """All invites of a pool, and who came by them."""
    with contextlib.closing(Access(folder / DATABASE)) as access:
        invites, machines = access.invites(), access.machines()
    if not invites:
        return "no invites"
    lines = []
    for id_, name, _, expires_at, uses, revoked_at, count in invites:
        state = (
            "revoked"
            if revoked_at
            else "expired"
            if expires_at <= time.time()
            else "used up"
            if count >= uses
            else "good"
        )
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires_at))
        lines.append(f"invite {id_}  {state:8}  until {until}  {count} of {uses} machines  {name}".rstrip())
        for machine, who, address, invite, at, sent_away_at in machines:
            if invite == id_:
                came = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
                away = "  revoked" if sent_away_at else ""
                lines.append(f"  machine {machine}  {who}  from {address}  since {came}{away}")
    return "\n".join(lines)


def revoke(folder: Path, what: str) -> str:
    """An invite by its id, or a machine by its id, a node's number, or its name. What was done."""
    root_of(folder)
    with contextlib.closing(Access(folder / DATABASE)) as access:
        if what in {row[0] for row in access.invites()}:
            access.revoke("invites", [what], time.time())
            return f"invite {what} is revoked; the machines that came by it stay (wide revoke {folder} NODE)"
        if machines := access.machines_of(what):
            access.revoke("machines", machines, time.time())
            came_by = sorted({row[3] for row in access.machines() if row[0] in machines})
            access.revoke("invites", came_by, time.time())  # or it would come back by it, as a new one
            return (
                f"machine {', '.join(machines)} is sent away, and the invite by which it came ({', '.join(came_by)}) "
                f"is good no more; others who came by it stay (another one: wide invite {folder})"
            )
    raise UsageError(
        f"{what}: no invite, machine or node of that id, number or name; `wide invites {folder}` lists them"
    )


def guests_of(folder: Path, keys: PoolKeys, token: str, evaluator: str, access: Access) -> Guests:
    """Who may come into the pool that this process coordinates."""
    last: list[Book] = [Book()]

    def read() -> Book:
        try:
            rows = [
                InviteRow(id_, expires_at, uses, revoked_at is not None, machines)
                for id_, _, _, expires_at, uses, revoked_at, machines in access.invites()
            ]
            last[0] = book_of(rows, access.revoked())
        except UsageError as error:  # a disk that fails: what was known still holds
            log.debug("%s", error)
        return last[0]

    return Guests(token, evaluator, keys.root, read)


def seconds_of(text: str) -> float:
    """`90m`, `24h`, `7d`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd])", text.strip())
    seconds = float(found[1]) * UNITS_S[found[2]] if found else 0.0
    if not 0 < seconds <= MOST_S:
        raise UsageError(f"--expires {text}: expected a time such as 90m, 24h or 7d, up to ten years")
    return seconds


def addresses_of(text: str, port: int) -> tuple[Address, ...]:
    """`--address HOST[:PORT],…`: where others find the pool."""
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        is_bare = ":" not in part or (part.count(":") > 1 and not part.startswith("["))
        found.append((part.strip("[]"), port) if is_bare else host_and_port(part))
        if not re.fullmatch(r"[\w.-]{1,253}|[0-9a-fA-F:.]+", found[-1][0]) or not _is_host(found[-1][0]):
            raise UsageError(f"--address {part}: expected HOST or HOST:PORT")
    if not 0 < len(found) <= MOST_ADDRESSES:
        raise UsageError(f"--address {text}: expected 1 to {MOST_ADDRESSES} of HOST or HOST:PORT, with commas between")
    return tuple(found)


def _is_host(host: str) -> bool:
    """A name, or a number that is one."""
    try:
        ipaddress.ip_address(host)
        return True
    except ValueError:
        pass
    try:
        return ":" not in host and not re.fullmatch(r"[\d.]+", host) and bool(host.encode("idna"))
    except UnicodeError:
        return False


def _addresses(folder: Path) -> tuple[Address, ...]:
    try:
        found: Any = json.loads((folder / ADDRESSES).read_text())
        return tuple((str(host), int(port)) for host, port in found)
    except (OSError, ValueError, TypeError):
        raise UsageError(f"{folder} does not say where its pool is: give --address HOST:PORT") from None


def _pin(folder: Path) -> bytes:
    try:
        return fingerprint(ssl.PEM_cert_to_DER_cert((folder / CERTIFICATE).read_text()))[:PIN_NBYTES]
    except (OSError, ValueError):
        raise UsageError(f"{folder} has no certificate: only the runs of `wide serve` can be joined") from None
