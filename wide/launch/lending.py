"""A machine that is lent to a pool: one node, or several, for as long as its owner does not want it back. Does not
import torch, unless this process is the node.
"""

from __future__ import annotations

import signal
from types import FrameType

import msgspec

from wide.config import Options, usable_cores
from wide.errors import Interrupted, OtherProgram, OtherSet, WideError
from wide.launch.guard import IDLE_S, Busy, Guard, Terms, wait_until_idle
from wide.launch.processes import Children, warm_up
from wide.launch.signals import SIGNALS, say_and_end
from wide.telemetry.log import log
from wide.transport.endpoint import Endpoint

OTHER_PROGRAM = 79  # a child's exit code: the pool trains another program by now
OTHER_SET = 80  # it uses another instruction set
LEAVE_S = 10.0  # for children to hand in what they have


class Lent(msgspec.Struct, frozen=True):
    """Everything that one node is told."""

    endpoint: Endpoint
    job: str
    name: str
    device: str
    log: str
    retry_s: float
    index: int = 0  # among those of this machine
    workers: int | None = None  # None: as the job says


def lend(lent: Lent, terms: Terms, is_again: bool = False) -> None:
    """Until the pool is done. Raises what ended it before. `is_again`: what this process has loaded does not fit."""
    terms.take_a_back_seat()
    count = terms.nodes if terms.nodes is not None else _count(lent)
    while True:
        try:
            if count == 1 and not is_again:
                from wide.launch.lent import serve_here

                return serve_here(lent, terms)
            return _serve_by_children(lent, terms, count)
        except Busy as busy:
            log.info("%s: this one waits until it is idle for %.0f s", busy, IDLE_S)
            wait_until_idle(terms)


def _count(lent: Lent) -> int:
    """One node for each accelerator; or as many as the cores have room for, with the job's threads."""
    from wide.launch.lent import threads_of
    from wide.node.greeting import default_nodes, pick_device

    if pick_device(lent.device).type != "cpu":
        return default_nodes(Options(device=lent.device))
    return max(1, usable_cores() // threads_of(lent.job))


def _serve_by_children(lent: Lent, terms: Terms, count: int) -> None:
    """Processes of their own, which end with this one."""
    warm_up(lent.job)
    children = Children()
    signals: list[int] = []

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        if not children.have_begun:  # torch, or the job's file, is still being loaded
            say_and_end(number, "left before it had joined")
        children.terminate() if len(signals) == 1 else children.kill()

    before = {number: signal.signal(number, leave) for number in SIGNALS}
    guard = Guard(terms, children.terminate)
    try:
        for index in range(count):
            name = f"{lent.name}-{index + 1}" if index else lent.name
            one = msgspec.structs.replace(lent, index=index, name=name)
            children.start("wide.launch.lent", "serve_as_child", one)
        if signals:  # before all were there to hear it
            children.terminate()
        with guard:
            children.join()
    finally:
        children.stop(LEAVE_S)
        for number, handler in before.items():
            signal.signal(number, handler)
    if signals or guard.why is not None:
        raise guard.why or Interrupted("left the pool", signals[0])
    if OTHER_PROGRAM in (codes := [code for code in children.exit_codes() if code]):
        raise OtherProgram("the pool's code has changed")
    if OTHER_SET in codes:
        raise OtherSet("the pool uses other instructions", "")
    if codes:
        error = WideError(f"{len(codes)} of this machine's {count} nodes ended before the run did; see above")
        error.exit_code = max(codes) if max(codes) > 0 else 1
        raise error
