"""`wide invite`, `wide invites`, `wide revoke`: who may come into a pool, also while it runs. Knows a run's folder."""

from __future__ import annotations

import contextlib
import ipaddress
import math
import re
import secrets
import ssl
import time
from pathlib import Path

import msgspec

from wide.dashboard.progress import counted
from wide.errors import UsageError
from wide.exchange.guests import Book, Guests, InviteRow, book_of
from wide.launch.keys import CERTIFICATE, PoolKeys, root_of, write_secret
from wide.store.access import Access
from wide.store.reading import DATABASE
from wide.telemetry.log import log
from wide.transport.tls import fingerprint
from wide.wire.invite import MOST_ADDRESSES, PIN_NBYTES, Address, Invite, parse
from wide.wire.proof import derived

EXPIRES_S, USES = 24 * 3600.0, 100
FIRST, LISTENING = "invite", "listening.json"  # the pool's first one, and where it is found, in the run's folder
LINKS = "dashboard"  # where its dashboard is, and by which secrets
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
MOST_S = 10 * 365 * 86400.0
LOOKERS = ("viewer", "admin")
MOST_FAILURES = 20  # to read what was written, one after the other; then it is told


class Listening(msgspec.Struct, frozen=True):
    """Where a pool listens, and where others find it; `are_named`: somebody said so."""

    host: str
    port: int
    addresses: tuple[Address, ...]
    are_named: bool = False


def make_invite(
    folder: Path, expires_s: float = EXPIRES_S, uses: int = USES, name: str = "", addresses: tuple[Address, ...] = ()
) -> Invite:
    """Good from now on, whether the pool runs or will be resumed."""
    root, now = root_of(folder), time.time()
    places = addresses or listening_in(folder).addresses
    id_ = secrets.token_hex(4)
    expires_min = math.ceil((now + expires_s) / 60)
    Access(folder / DATABASE).add(id_, name, now, now + expires_s, uses)
    return Invite(id_, expires_min, places, _pin(folder), derived(root, "invite", id_))


def first_invite(folder: Path) -> tuple[Invite, str]:
    """What `wide serve` prints: the run's first one again, as long as it is good and leads here; and for how long, for
    how many machines.
    """
    with contextlib.suppress(OSError, UsageError, KeyError):
        before = parse((folder / FIRST).read_text())
        rows = {row[0]: row for row in Access(folder / DATABASE).invites()}
        _, _, _, expires_at, uses, revoked_at, machines = rows[before.id]
        is_good = revoked_at is None and expires_at - time.time() > 60 and machines < uses
        if is_good and before.addresses == listening_in(folder).addresses and before.pin == _pin(folder):
            return before, _terms(expires_at - time.time(), uses - machines)
    return new_first_invite(folder), terms_of()


def new_first_invite(folder: Path) -> Invite:
    invite = make_invite(folder, name="first")
    write_secret(folder / FIRST, invite.encode() + "\n")
    return invite


def terms_of() -> str:
    """Of an invite that was made without asking for anything else."""
    return _terms(EXPIRES_S, USES)


def _terms(seconds: float, machines: int) -> str:
    """`24 hours, 100 machines`."""
    spent = f"{seconds / 3600:.0f} hours" if seconds >= 5400 else f"{seconds / 60:.0f} minutes"
    return f"{spent}, {machines} machine{'s' * (machines != 1)}"


def listed(folder: Path) -> str:
    """All invites of a pool, and who came by them."""
    access = Access(folder / DATABASE)
    invites, machines = access.invites(), access.machines()
    if not invites:
        return "no invites"
    lines = []
    for id_, name, _, expires_at, uses, revoked_at, count in invites:
        state = _state(expires_at, uses, revoked_at, count)
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(expires_at))
        lines.append(f"invite {id_}  {state:8}  until {until}  {count} of {uses} machines  {name}".rstrip())
        for machine, who, address, invite, at, sent_away_at in machines:
            if invite == id_:
                came = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
                away = "  revoked" if sent_away_at else ""
                lines.append(f"  machine {machine}  {who}  from {address}  since {came}{away}")
    return "\n".join(lines)


def _state(expires_at: float, uses: int, revoked_at: float | None, count: int) -> str:
    if revoked_at is not None:
        return "revoked"
    if expires_at <= time.time():
        return "expired"
    return "used up" if count >= uses else "good"


def revoke(folder: Path, what: str) -> str:
    """An invite by its id, a machine by its id, a node's number, or its name; or the secret with which a dashboard is
    looked at (`viewer`), or steers (`admin`). What was done.
    """
    root_of(folder)
    access = Access(folder / DATABASE)
    if what in LOOKERS:
        access.replace(what)
        return f"the {what}'s secret of the dashboard is revoked; if one runs, {folder}/{LINKS} has the new link"
    rows = {row[0]: row for row in access.machines()}
    if what in {row[0] for row in access.invites()}:
        access.revoke([], [what], time.time())
        count = sum(row[3] == what for row in rows.values())
        stay = f"; {counted(count, 'machine')} that came by it can still work" if count else ""
        return f"invite {what} is revoked{stay}"
    machines = access.machines_of(what)
    if len(machines) > 1:
        raise UsageError(f"{len(machines)} machines are called {what}: say which one by its id: {', '.join(machines)}")
    if not machines:
        raise UsageError(f"{what}: no invite, machine or node of that id, number or name; see `wide invites {folder}`")
    invite = rows[machines[0]][3] if machines[0] in rows else ""
    access.revoke(machines, [invite], time.time())  # or it would come back by it, as a new one
    return f"machine {machines[0]} is sent away{_without(folder, invite)}"


def _without(folder: Path, invite: str) -> str:
    if not invite:
        return ""
    words = f", and invite {invite}, by which it came, is revoked; others who came by it stay"
    with contextlib.suppress(OSError, UsageError):
        if parse((folder / FIRST).read_text()).id == invite:
            new_first_invite(folder)
            words += f" ({folder}/{FIRST} holds a new one)"
    return words


def guests_of(folder: Path, keys: PoolKeys, token: str, evaluator: str) -> Guests:
    """Who may come into the pool that this process coordinates."""
    access, last, failures = Access(folder / DATABASE, patience_s=0.0), [Book()], 0

    def read() -> Book:
        nonlocal failures
        try:
            rows = [
                InviteRow(id_, expires_at, uses, revoked_at is not None, machines)
                for id_, _, _, expires_at, uses, revoked_at, machines in access.invites()
            ]
            last[0], failures = book_of(rows, access.revoked()), 0
        except UsageError as error:  # it is being written, or a disk fails: what was known still holds
            failures += 1
            if failures == MOST_FAILURES:
                log.error("%s: who is invited or revoked now is not known here until it can be", error)
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
        is_bare = ":" not in part or part.endswith("]") or (part.count(":") > 1 and not part.startswith("["))
        host, _, number = (part, "", str(port)) if is_bare else part.rpartition(":")
        found.append((host.strip("[]"), int(number) if number.isascii() and number.isdigit() else 0))
        if (
            not 0 < found[-1][1] < 65536
            or not re.fullmatch(r"[\w.-]{1,253}|[0-9a-fA-F:.]+", found[-1][0])
            or not _is_host(found[-1][0])
        ):
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


def listening_in(folder: Path) -> Listening:
    """As the pool in that folder was last served."""
    try:
        found = msgspec.json.decode((folder / LISTENING).read_bytes(), type=Listening)
        if not found.addresses or not all(0 < port < 65536 for _, port in found.addresses):
            raise ValueError("no address")
        return found
    except (OSError, ValueError, msgspec.MsgspecError):
        raise UsageError(f"{folder} does not say where its pool is: give --address HOST:PORT") from None


def _pin(folder: Path) -> bytes:
    try:
        return fingerprint(ssl.PEM_cert_to_DER_cert((folder / CERTIFICATE).read_text()))[:PIN_NBYTES]
    except (OSError, ValueError):
        raise UsageError(f"{folder} has no certificate: only the runs of `wide serve` can be joined") from None
