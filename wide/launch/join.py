"""`wide join`: this machine works for a pool until the pool is done, on its owner's terms."""

from __future__ import annotations

import functools
import os
import shlex
import socket
import time
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from wide.config import Sockets, usable_cores
from wide.errors import OtherProgram, OtherSet, ProtocolError, Refused, UsageError
from wide.job.place import located
from wide.job.spec import arguments_of, values_of_words, with_told
from wide.launch import memories
from wide.launch.code import MOST_ARGUMENTS, check_consent, offered, put_down
from wide.launch.guard import Terms
from wide.launch.instructions import change, follow
from wide.launch.lending import Lent, lend
from wide.launch.signals import on_signals, say_and_end
from wide.launch.token import forget_token
from wide.launch.visit import VARIABLE, Target, Visit, is_typed, patiently, target_of, visit
from wide.telemetry.log import log, logging_to
from wide.transport.endpoint import Endpoint
from wide.wire import words
from wide.wire.messages import Offer

MOST_SETS = 16  # that a pool may ask for, one after the other
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
    workers: int | None = None


def join(joining: Joining) -> int:
    """Returns the exit code the coordinator asked for."""
    on_signals(lambda number, frame: say_and_end(number, "left before it had joined"))
    if joining.job is not None:
        joining = replace(joining, job=located(joining.job))
    target = target_of(joining.target, joining.token_file, joining.sockets, joining.is_insecure)
    forget_token()
    os.environ.pop(VARIABLE, None)
    name = joining.name or socket.gethostname()
    with logging_to(joining.log, lives=joining.terms.nodes == 1):
        _tell_terms(joining.terms, has_invite=target.invite is not None)
        before = ""
        while True:
            pool, job, digest = _visited(target, joining, name)
            pool = msgspec.structs.replace(pool, most_bytes_per_s=joining.most_bytes_per_s)
            try:
                lent = Lent(pool, job, name, joining.device, joining.log, joining.retry_s, workers=joining.workers)
                _lend(lent, joining, target)
                return 0
            except OtherProgram:
                if not digest or digest == before:
                    raise
                before = digest
                log.info("the pool trains other code by now: looking at it")


def _lend(lent: Lent, joining: Joining, target: Target) -> None:
    """A pool that needs another instruction set is worked for by a process that has it: a new one, which was not told
    anything else, and whose owner is not asked again.
    """
    is_again = False
    for _ in range(MOST_SETS):
        try:
            return lend(lent, joining.terms, is_again)
        except OtherSet as other:
            told, is_again = other.isa, True
            if not told:  # a child of this process has heard it
                look = functools.partial(visit, target, lent.name, "guest")
                told = patiently(look, joining.retry_s, joining.terms.until)[0].offer.isa
            change(other, told)
    raise Refused("the pool asks for one instruction set after the other")


def _tell_terms(terms: Terms, has_invite: bool) -> None:
    if terms.until is not None:
        until = time.strftime("%H:%M on %A", time.localtime(terms.until))
        log.info("this machine is lent until %s", until)
    if has_invite and terms.nodes == 1 and (cores := usable_cores()) > 1:
        log.info("lending 1 of this machine's %d cores; --nodes auto lends all of them", cores)


def _visited(target: Target, joining: Joining, name: str) -> tuple[Endpoint, str, str]:
    """How to come in, with which job, and the hash of its code if the pool sent that."""
    if target.invite is None and joining.job is not None:
        return target.endpoint, joining.job, ""
    seen, pool = patiently(lambda: visit(target, name, "guest"), joining.retry_s, joining.terms.until)
    known = "answers with the right certificate" if seen.is_encrypted else "answers, and knows the secret"
    log.info("%s %s. Job %s; %s to it.", seen.address, known, _quoted(seen.offer), seen.width)
    follow(seen.offer.isa)
    job, digest = (_own_job(joining.job, seen), "") if joining.job is not None else _code(target, seen, joining)
    if pool.credential.name.startswith("invite "):  # it has no key of its own there, or none that is good
        if is_typed(joining.target):
            log.info("the invite is in your shell's history now; `wide join` alone asks for it, and does not show it")
        _, pool = patiently(lambda: visit(target, name, "visitor"), joining.retry_s, joining.terms.until)
    return pool, job, digest


def _quoted(offer: Offer) -> str:
    count, unit = (offer.parameters / 1e6, " M") if offer.parameters >= 1e5 else (offer.parameters, "")
    return f'"{words.name(offer.job)}", {count:,.{1 if unit else 0}f}{unit} parameters, {offer.samples:,} samples'


def _own_job(job: str, seen: Visit) -> str:
    """The pool does not choose what this machine's own file is told: no words, that is. Numbers are the pool's, but for
    those that its owner gives; should anything differ then, it is refused with its name.
    """
    theirs = seen.offer.arguments
    if theirs != arguments_of(job):
        said = words.line(shlex.join(theirs)) if theirs else "none"
        raise Refused(f"the pool's job has other arguments than yours ({said}): give the same ones behind --")
    try:
        told = values_of_words(seen.offer.values[:MOST_ARGUMENTS])
    except (ValueError, RecursionError):
        raise ProtocolError("wrong names", "the job's values are not such as can be read") from None
    return with_told(job, {name: one.value for name, one in told.items() if _is_numeric(one.value)})


def _is_numeric(value: Any) -> bool:
    return all(map(_is_numeric, value)) if isinstance(value, list) else isinstance(value, int | float | None)


def _code(target: Target, seen: Visit, joining: Joining) -> tuple[str, str]:
    """The pool's code, if this machine's owner allows it; where it is now, and its hash."""
    if not seen.offer.files:
        raise UsageError("this pool does not send its code: give --job FILE, the same file that it trains")
    code = offered(seen.offer, seen.payload)
    spec, remembered = put_down(code), target.memory.allowed
    log.info("the pool sends its code: %s%s", code.words, "; allowed before" if code.digest in remembered else "")
    check_consent(code, joining.allow_code, remembered)
    if target.endpoint.pin:
        memories.allow(target.endpoint.pin, code.digest)
    return spec, code.digest
