"""The commands for machines that join, and for those who let them in: join, doctor, invite, invites, revoke."""

from __future__ import annotations

import argparse
import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wide.config import SOCKET_HELP, resolve, size_of
from wide.errors import UsageError

INVITE_HELP = "wide1_…, as `wide serve` printed it; @FILE; - (read from stdin); default: WIDE_INVITE, or asked for"
MOST_NODES, MOST_CORES, MOST_USES = 1024, 4096, 1_000_000


def add_commands(commands: Any) -> None:
    _add_join(commands.add_parser("join", help="lend this machine to a pool"))
    doctor = commands.add_parser("doctor", help="what on this machine would get in the way, and how to mend it")
    doctor.add_argument("invite", metavar="INVITE", nargs="?", help="of a pool that should be reached from here")
    doctor.set_defaults(call=_doctor)
    invite = commands.add_parser("invite", help="another invite to a pool")
    invite.add_argument("run", metavar="RUN", help="the pool's run folder")
    invite.add_argument("--expires", metavar="TIME", help="for how long it is good: 90m, 24h (default), 7d")
    invite.add_argument("--uses", metavar="N", help="how many machines may come by it (default: 100)")
    invite.add_argument("--name", default="", help="for whom it is, to be found again in `wide invites`")
    invite.add_argument(
        "--address", metavar="HOST[:PORT],…", help="where others find the pool, if not where it listens"
    )
    invite.set_defaults(call=_invite)
    invites = commands.add_parser("invites", help="a pool's invites, and the machines that came by them")
    invites.add_argument("run", metavar="RUN", help="the pool's run folder")
    invites.set_defaults(call=_invites)
    revoke = commands.add_parser("revoke", help="an invite is good no more; or a machine is sent away, for good")
    revoke.add_argument("run", metavar="RUN", help="the pool's run folder")
    revoke.add_argument("what", metavar="ID|NODE", help="an invite, machine, node, name; or: viewer, admin")
    revoke.set_defaults(call=_revoke)


def _add_join(command: argparse.ArgumentParser) -> None:
    command.add_argument("target", metavar="INVITE", nargs="?", help=f"{INVITE_HELP}. Or HOST:PORT, with a token")
    command.add_argument(
        "--job", metavar="FILE", help="your own copy of the job, instead of the code that the pool sends"
    )
    command.add_argument("--set", metavar="NAME=VALUE", action="append", help="with --job: as `wide run` takes it")
    command.add_argument("--allow-code", metavar="HASH|any", help="run the pool's code if it has this sha256, unasked")
    command.add_argument("--token-file", metavar="FILE", help="with HOST:PORT: the pool's token (or set WIDE_TOKEN)")
    command.add_argument("--name", help="how this machine is called in the pool (default: its host name)")
    command.add_argument(
        "--nodes", metavar="N|auto", help="nodes on this machine (default: 1; auto: one for each core)"
    )
    command.add_argument("--threads", metavar="N", help="use at most so many cores")
    command.add_argument("--device", metavar="auto|cpu|cuda:0|mps", help="where to compute (default: auto)")
    command.add_argument("--workers", metavar="N", help="processes for each node that fetch batches ahead")
    command.add_argument("--max-memory", metavar="SIZE", help="leave, should the nodes use more than this: 8G")
    command.add_argument("--max-rate", metavar="MBIT", help="megabits a second, each way, for each node")
    command.add_argument("--until", metavar="HH:MM", help="leave at this time, with all work handed in")
    command.add_argument("--nice", action="store_true", help="let other programs go first")
    command.add_argument("--only-idle", action="store_true", help="only while nobody else uses this machine")
    command.add_argument("--log", metavar="silent|normal|verbose", help="how much is said on stderr (default: normal)")
    command.add_argument("--socket", metavar="KEY=VALUE,…", help=SOCKET_HELP)
    command.add_argument("--insecure", action="store_true", help="HOST:PORT may be another machine, unencrypted")
    command.add_argument(
        "--retry",
        metavar="S",
        help="how long to look for a coordinator that is not there, or went away (default: 3600; 0: leave at once)",
    )
    command.set_defaults(call=join)


def join(arguments: argparse.Namespace) -> int:
    from wide.launch import join as joined
    from wide.launch.guard import Terms, until_of

    given = {name: getattr(arguments, name) for name in ("device", "log", "socket", "workers")}
    environ = {name: os.environ.get(name, "") for name in ("WIDE_DEVICE", "WIDE_LOG", "WIDE_SOCKET", "WIDE_WORKERS")}
    options = resolve(given, environ)  # a node has no other options of a run
    now = datetime.datetime.now()
    terms = Terms(
        nodes=None if arguments.nodes == "auto" else _whole("--nodes", arguments.nodes, MOST_NODES, 1, " or auto"),
        cores=_whole("--threads", arguments.threads, MOST_CORES, 0),
        most_memory=_parsed("--max-memory", arguments.max_memory, _memory, "a size such as 500M or 8G", 0),
        until=_parsed("--until", arguments.until, lambda text: until_of(text, now), "a time such as 18:30", None),
        is_nice=arguments.nice,
        only_idle=arguments.only_idle,
    )
    retry_s = _parsed("--retry", arguments.retry, _seconds, "a number of seconds", joined.RETRY_S)
    rate = _parsed("--max-rate", arguments.max_rate, _rate, "a number of megabits a second, above 0", 0.0)
    return joined.join(
        joined.Joining(
            arguments.target,
            arguments.job,
            arguments.token_file,
            arguments.name,
            options.device,
            options.log,
            options.socket,
            retry_s,
            arguments.allow_code,
            rate,
            arguments.insecure,
            terms,
            options.workers,
        )
    )


def _doctor(arguments: argparse.Namespace) -> int:
    from wide.launch.doctor import examine

    return examine(arguments.invite)


def _invite(arguments: argparse.Namespace) -> int:
    from wide.launch.invites import EXPIRES_S, USES, addresses_of, listening_in, make_invite, seconds_of

    folder = Path(arguments.run)
    places = addresses_of(arguments.address, listening_in(folder).port) if arguments.address else ()
    expires_s = seconds_of(arguments.expires) if arguments.expires else EXPIRES_S
    uses = _whole("--uses", arguments.uses, MOST_USES, USES)
    invite = make_invite(folder, expires_s, uses, _line(arguments.name), places)
    until = time.strftime("%Y-%m-%d %H:%M", time.localtime(invite.expires_at))
    count = f"{uses} machine{'s' * (uses != 1)}"
    print(f"invite {invite.id}, for {count}, until {until}; this line is a secret:", file=sys.stderr)
    print(f"wide join {invite.encode()}", flush=True)
    return 0


def _invites(arguments: argparse.Namespace) -> int:
    from wide.launch.invites import listed

    print(listed(Path(arguments.run)), flush=True)
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    from wide.launch.invites import revoke

    print(revoke(Path(arguments.run), arguments.what), file=sys.stderr)
    return 0


def _parsed(option: str, text: str | None, parse: Callable[[str], Any], expected: str, default: Any) -> Any:
    if text is None:
        return default
    try:
        return parse(text)
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text}: expected {expected}") from None


def _whole(option: str, text: str | None, most: int, default: int, otherwise: str = "") -> int:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= most):
            raise ValueError
        return int(text)

    number: int = _parsed(option, text, parse, f"a whole number from 1 to {most}{otherwise}", default)
    return number


def _memory(text: str) -> int:
    nbytes = size_of(text, most=1 << 50)
    if not nbytes:
        raise ValueError
    return nbytes


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) < 1e9:
        raise ValueError
    return seconds


def _rate(text: str) -> float:
    if not 0 < (mbit := float(text)) < 1e9:
        raise ValueError
    return mbit * 1e6 / 8


def _line(text: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:64])
