"""`wide join`: this machine works for a pool until the pool is done, on its owner's terms."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field

import msgspec

from wide.config import Sockets, usable_cores
from wide.errors import UsageError
from wide.job.loading import find, with_arguments
from wide.launch import memories
from wide.launch.code import check_consent, offered, put_down
from wide.launch.guard import Terms
from wide.launch.lending import Lent, lend
from wide.launch.signals import on_signals, say_and_end
from wide.launch.token import forget_token
from wide.launch.visit import VARIABLE, Target, Visit, is_typed, patiently, target_of, visit
from wide.telemetry.log import log, logging_to
from wide.transport.tcp import shown
from wide.wire.messages import Offer

RETRY_S = 3600.0  # how long a pool is looked for that went away


@dataclass(frozen=True)
class Joining:
    """What `wide join` was told. `target` is an invite, `-`, `@file`, HOST:PORT, or nothing."""

    target: str | None
    job: str | None
    token_file: str | None
    name: str | None
    device: str
    log: str
    sockets: Sockets
    retry_s: float = RETRY_S
    allow_code: str | None = None
    most_bytes_per_s: float = 0.0
    is_insecure: bool = False
    terms: Terms = field(default_factory=Terms)


def join(joining: Joining) -> int:
    """Returns the exit code the coordinator asked for."""
    on_signals(lambda number, frame: say_and_end(number, "left before it had joined"))
    if joining.job is not None:
        find(joining.job)
    target = target_of(joining.target, joining.token_file, joining.sockets, joining.is_insecure)
    forget_token()
    os.environ.pop(VARIABLE, None)
    name = joining.name or socket.gethostname()
    with logging_to(joining.log):
        pool, job = target.endpoint, joining.job
        if target.invite is not None or job is None:
            was_enrolled = target.is_enrolled
            seen, pool = patiently(lambda: visit(target, name), joining.retry_s)
            _tell(target, seen, is_typed=not was_enrolled and is_typed(joining.target))
            own = with_arguments(job, seen.offer.arguments) if job is not None else None
            job = own or _code(target, seen, joining.allow_code)
        assert job is not None
        pool = msgspec.structs.replace(pool, most_bytes_per_s=joining.most_bytes_per_s)
        cores = usable_cores()
        if joining.terms.nodes == 1 and cores > 1 and target.invite is not None:
            log.info("lending 1 of this machine's %d cores; --nodes auto lends all of them", cores)
        lend(Lent(pool, job, name, joining.device, joining.log, joining.retry_s), joining.terms)
    return 0


def _tell(target: Target, seen: Visit, is_typed: bool) -> None:
    where = " or ".join(shown(*address) for address in target.endpoint.addresses)
    known = "answers with the right certificate" if seen.is_encrypted else "answers, and knows the secret"
    log.info("%s %s. Job %s%s.", where, known, _quoted(seen.offer), _width(seen))
    if is_typed:
        log.info("the invite is in your shell's history now; `wide join` alone asks for it, and does not show it")


def _quoted(offer: Offer) -> str:
    count, unit = (offer.parameters / 1e6, " M") if offer.parameters >= 1e5 else (offer.parameters, "")
    job = "".join(c if c.isprintable() else "?" for c in offer.job[:64])
    return f'"{job}", {count:,.{1 if unit else 0}f}{unit} parameters, {offer.samples:,} samples'


def _width(seen: Visit) -> str:
    return f"; about {8e-6 * seen.bytes_per_s:.3g} Mbit/s to it" if seen.bytes_per_s else ""


def _code(target: Target, seen: Visit, allowed: str | None) -> str:
    """The pool's code, if this machine's owner allows it; where it is now."""
    if not seen.offer.files:
        raise UsageError("this pool does not send its code: give --job FILE, the same file that it trains")
    code = offered(seen.offer, seen.payload)
    log.info("the pool sends its code: %s", code.words)
    spec = put_down(code)
    check_consent(code, allowed, target.memory.allowed)
    if target.endpoint.pin:
        memories.allow(target.endpoint.pin, code.digest)
    return spec
