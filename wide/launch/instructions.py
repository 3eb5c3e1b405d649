"""Which instruction set the processes of a run use: told before torch is loaded, where that still counts, and refused
where it does not. Does not import torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from wide.config import Options
from wide.errors import OtherSet, Refused, StartsAgain, UsageError
from wide.job import isa
from wide.job.isa import Isa
from wide.launch import costs
from wide.launch.story import isa_of
from wide.telemetry.log import log


def chosen(options: Options, folder: Path | None) -> Isa | None:
    """What --isa says; else what the run in `folder` had settled on, if it goes on. None: whatever is used here."""
    if options.isa != "auto":
        return isa.wanted(options.isa, isa.cpu())
    before = isa_of(folder) if folder is not None else None
    return before if before is not None and before.how == isa.FIXED and isa.cpu().has(before) else None


def obey(wanted: Isa | None, tells: bool = True) -> None:
    """In this process, and in those that it starts."""
    if wanted is None or wanted == isa.now():
        return
    if "torch" in sys.modules:
        raise UsageError(
            f"--isa {wanted.name}: torch is loaded here already, with {isa.now().name}; set {shown(wanted)} before, "
            "or train with nodes, which are processes of their own"
        )
    isa.use(wanted, os.environ)
    if tells and (words := costs.words(wanted)):
        print(f"wide: {words}", file=sys.stderr, flush=True)


def shown(wanted: Isa) -> str:
    return " ".join(f"{name}={value}" for name, value in wanted.variables.items())


@contextlib.contextmanager
def for_children(wanted: Isa | None) -> Iterator[None]:
    """Processes that are started within the block use it; this one stays as it is."""
    names = (*isa.VARIABLES, isa.BEST)
    before = {name: os.environ[name] for name in names if name in os.environ}
    if wanted is not None and wanted != isa.now():
        isa.use(wanted, os.environ)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


def follow(told: str) -> None:
    """A pool has told which one it uses. If this machine has it, the processes that are started from now on use it."""
    wanted = isa.parse(told)
    if wanted is None or wanted == isa.now() or not isa.best_here().has(wanted):
        return
    isa.use(wanted, os.environ)
    words = costs.words(wanted) if log.isEnabledFor(logging.INFO) else ""
    cost = f": {words}" if words else ""
    log.info("the pool uses %s instructions, so that all compute the same bits%s", wanted.name, cost)


def change(other: OtherSet, told: str) -> None:
    """A node was sent away to come again with another set."""
    if isa.parse(told) == isa.now():
        raise Refused(
            f"{other}; this machine does so already, and the pool does not see it: tell whoever runs the pool"
        )
    follow(told)


def start_again(again: StartsAgain, token: str) -> NoReturn:
    """The same command, as a new program in this process, which goes on with the run's folder, keys, port, invite."""
    from wide.launch.invites import listening_in

    wanted = isa.parse(again.isa)
    assert wanted is not None
    isa.use(wanted, os.environ)
    if token:
        os.environ["WIDE_TOKEN"] = token
    words = sys.orig_argv[1:]
    place = words.index("--") if "--" in words else len(words)
    words[place:place] = ["--resume", again.folder, "--port", str(listening_in(Path(again.folder)).port)]
    why = "which all of its machines have, so that all compute the same bits"
    print(f"wide: {again}, {why}; nothing was trained yet, and it begins anew", file=sys.stderr, flush=True)
    os.execv(sys.executable, [sys.executable, *words])
